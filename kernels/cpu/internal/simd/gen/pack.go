package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// pack emits the making of panels.
func pack(m machine) {
	copyRows(m)
	if !m.wide {
		transpose8(m) // the narrow one serves both: what it waits for is memory
	}
}

func copyRows(m machine) {
	m.function("packRows", "dst, src *float32, ld, rows int", "copies rows of one panel; see Pack.")
	dst, src, ld, rows := m.argument("dst"), m.argument("src"), m.argument("ld"), m.argument("rows")
	m.SHLQ(U8(2), ld)
	m.Label("rows")
	for j := range 2 {
		v := m.vec()
		m.VMOVUPS(at(src, j*m.bytes()), v)
		m.VMOVUPS(v, at(dst, j*m.bytes()))
	}
	m.ADDQ(ld, src)
	m.ADDQ(imm(2*m.bytes()), dst)
	m.DECQ(rows)
	m.JNZ(LabelRef("rows"))
	m.end()
}

// transpose8 turns squares of 8 x 8: pairs of rows are interleaved by one, by two and by four elements.
func transpose8(m machine) {
	m.function("transpose8", "dst *float32, ldd int, src *float32, lds, squares int, scale float32",
		"writes 8 rows of src as 8 columns of dst, times scale; see PackTransposed.")
	dst, ldd, src, lds := m.argument("dst"), m.argument("ldd"), m.argument("src"), m.argument("lds")
	squares := m.argument("squares")
	m.SHLQ(U8(2), lds)
	m.SHLQ(U8(2), ldd)
	scale := m.vec()
	m.VBROADCASTSS(m.address("scale"), scale)
	from, to := m.eightRows(lds), m.eightRows(ldd)
	m.Label("squares")
	x := make([]reg.Register, 8)
	addresses := from(src)
	for i := range x {
		x[i] = m.vec()
		m.VMULPS(addresses[i], scale, x[i])
	}
	x = m.interleave(x, 1, func(a, b, lo, hi reg.Register) {
		m.VUNPCKLPS(b, a, lo)
		m.VUNPCKHPS(b, a, hi)
	})
	x = m.interleave(x, 2, func(a, b, lo, hi reg.Register) {
		m.VSHUFPS(U8(0x44), b, a, lo)
		m.VSHUFPS(U8(0xee), b, a, hi)
	})
	x = m.interleave(x, 4, func(a, b, lo, hi reg.Register) {
		m.VPERM2F128(U8(0x20), b, a, lo)
		m.VPERM2F128(U8(0x31), b, a, hi)
	})
	// Interleaving by one keeps two columns together, so register r holds the column with the lower two bits of r
	// swapped.
	addresses = to(dst)
	for r, v := range x {
		m.VMOVUPS(v, addresses[r&4|r&1<<1|r&2>>1])
	}
	m.ADDQ(imm(32), src)
	m.LEAQ(indexed(dst, ldd, 8, 0), dst)
	m.DECQ(squares)
	m.JNZ(LabelRef("squares"))
	m.end()
}

// interleave joins the registers whose numbers differ in one bit; the lower half of the result goes to the one without
// it.
func (m machine) interleave(x []reg.Register, bit int, join func(a, b, lo, hi reg.Register)) []reg.Register {
	y := make([]reg.Register, len(x))
	for i := range x {
		if i&bit == 0 {
			y[i], y[i|bit] = m.vec(), m.vec()
			join(x[i], x[i|bit], y[i], y[i|bit])
		}
	}
	return y
}

// eightRows returns the addresses of 8 rows that are ld bytes apart.
func (m machine) eightRows(ld reg.Register) func(base reg.Register) []Mem {
	three := m.GP64()
	m.LEAQ(indexed(ld, ld, 2, 0), three)
	return func(base reg.Register) []Mem {
		half := m.GP64()
		m.LEAQ(indexed(base, ld, 4, 0), half)
		var out []Mem
		for _, b := range []reg.Register{base, half} {
			out = append(out, at(b, 0), indexed(b, ld, 1, 0), indexed(b, ld, 2, 0), indexed(b, three, 1, 0))
		}
		return out
	}
}

// rows emits what attention does with a row of a head: whole vectors of it, while a caller does the rest.
func rows(m machine) {
	scaled(m)
	dot(m)
}

// vectors emits a loop over n vectors, with the position in bytes.
func (m machine) vectors(f func(x reg.Register)) {
	x, n := m.GP64(), m.argument("n")
	m.XORQ(x, x)
	m.Label("vectors")
	f(x)
	m.ADDQ(imm(m.bytes()), x)
	m.DECQ(n)
	m.JNZ(LabelRef("vectors"))
}

func scaled(m machine) {
	m.function("scaled", "dst, src *float32, n int, x float32", "sets n vectors of dst to src times x; see Scaled.")
	dst, src, factor := m.argument("dst"), m.argument("src"), m.vec()
	m.VBROADCASTSS(m.address("x"), factor)
	m.vectors(func(x reg.Register) {
		v := m.vec()
		m.VMULPS(indexed(src, x, 1, 0), factor, v)
		m.VMOVUPS(v, indexed(dst, x, 1, 0))
	})
	m.end()
}

func dot(m machine) {
	m.function("dot", "a, b *float32, n int, sums *float64", "adds up the products of n vectors by lane; see Dot.")
	a, b := m.argument("a"), m.argument("b")
	var sum [2]reg.Register
	for i := range sum {
		sum[i] = m.vec()
		m.zero(sum[i])
	}
	m.vectors(func(x reg.Register) {
		for i := range sum {
			p, q := m.vec(), m.vec()
			m.VCVTPS2PD(indexed(a, x, 1, i*m.bytes()/2), p)
			m.VCVTPS2PD(indexed(b, x, 1, i*m.bytes()/2), q)
			m.VFMADD231PD(p, q, sum[i])
		}
	})
	m.VADDPD(sum[1], sum[0], sum[0])
	m.VMOVUPD(sum[0], at(m.argument("sums"), 0))
	m.end()
}
