package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// halves emits conversions from and to 16 bits of a number of elements that is a multiple of the vector's.
func halves(m machine) {
	m.narrow("toBF16", m.toBF16)
	m.narrow("toF16", func(v reg.VecVirtual, to Mem, _ bf16) { m.VCVTPS2PH(imm(0), v, to) })
	m.widen("fromBF16", func(from Mem, v reg.VecVirtual) {
		m.VPMOVZXWD(from, v)
		m.VPSLLD(imm(16), v, v)
	})
	m.widen("fromF16", func(from Mem, v reg.VecVirtual) { m.VCVTPH2PS(from, v) })
}

// short returns where the 16-bit elements of p are.
func (p piece) short(base reg.Register) Mem { return indexed(base, p.i, 2, 0) }

func (m machine) narrow(name string, convert func(v reg.VecVirtual, to Mem, c bf16)) {
	m.function(name, "n int, dst *uint16, src *float32", "converts n elements; see "+exported(name)+".")
	a := m.arguments("n", "dst", "src")
	c := bf16{m.bits(1), m.bits(0x7fff), m.bits(0x40 << 16)}
	m.over(a[0], "", 1).whole(func(p piece) { convert(p.load(a[2]), p.short(a[1]), c) })
	m.end()
}

func (m machine) widen(name string, convert func(from Mem, v reg.VecVirtual)) {
	m.function(name, "n int, dst *float32, src *uint16", "converts n elements; see "+exported(name)+".")
	a := m.arguments("n", "dst", "src")
	m.over(a[0], "", 1).whole(func(p piece) {
		v := p.vec()
		convert(p.short(a[2]), v)
		p.store(v, a[1])
	})
	m.end()
}

// toBF16 is the conversion of a vector to the upper 16 bits after adding half a unit, less one bit where the last bit
// that is kept is 0. For NaN it is the upper bits with the quiet bit.
func (m machine) toBF16(v reg.VecVirtual, to Mem, c bf16) {
	odd, nan := m.vec(), m.vec()
	m.VORPS(c.quiet, v, nan)
	m.VPSRLD(imm(16), v, odd)
	m.VANDPS(c.one, odd, odd)
	m.VPADDD(c.below, odd, odd)
	m.VPADDD(v, odd, odd)
	const unordered = 3
	if m.wide {
		isNaN := m.K()
		m.VCMPPS(imm(unordered), v, v, isNaN)
		m.VMOVAPS(nan, isNaN, odd)
		m.VPSRLD(imm(16), odd, odd)
		m.VPMOVDW(odd, to)
		return
	}
	m.VCMPPS(imm(unordered), v, v, v)
	m.VBLENDVPS(v, nan, odd, odd)
	m.VPSRLD(imm(16), odd, odd)
	m.VPACKUSDW(odd, odd, odd) // each half of the vector for itself: words 0 and 2 of four
	m.VPERMQ(imm(0b1000), odd, odd)
	m.VMOVUPS(odd.AsX(), to)
}

// A bf16 is the constants of toBF16.
type bf16 struct{ one, below, quiet Op }
