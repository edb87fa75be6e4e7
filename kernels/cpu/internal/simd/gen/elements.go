package main

import (
	"strings"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// ops emits the elementwise operations and those on rows.
func ops(m machine) {
	m.addTo()
	loss(m)
	m.swiGLU()
	m.swiGLUBackward()
	norm(m)
	m.turn()
	m.adamW()
	halves(m)
}

// elements begins an elementwise function. Its parameters are n and the arrays named in pointers. elements returns them
// in registers.
func (m machine) elements(name, pointers, more string) (n reg.Register, arrays []reg.Register) {
	names := strings.Split(pointers, ", ")
	m.function(name, "n int, "+pointers+" *float32"+more)
	return m.argument("n"), m.arguments(names...)
}

func (m machine) addTo() {
	n, a := m.elements("addTo", "dst, a, b", "")
	m.over(n, "", 4).each(func(p piece) {
		x, y := p.load(a[1]), p.load(a[2])
		p.VADDPS(y, x, x)
		p.store(x, a[0])
	})
	m.end()
}

// sigmoid emits s(x) and, in full precision, 1 - s(x) = s(-x). With t = e^-|x|, they are 1/(1+t) and t/(1+t).
type sigmoid struct {
	exponential
	sign Op
}

func (m machine) sigmoid() sigmoid { return sigmoid{m.exponential(), m.bits(1 << 31)} }

// A fraction holds the denominator of a sigmoid: 1 + t as sum + rest, and 1/sum.
type fraction struct {
	t, sum, rest, over reg.VecVirtual
}

func (s sigmoid) fraction(x reg.VecVirtual) fraction {
	f := fraction{s.vec(), s.vec(), s.vec(), s.vec()}
	s.VORPS(s.sign, x, f.t)
	s.ofSmall(f.t)
	s.VADDPS(s.one, f.t, f.sum)
	s.VSUBPS(s.one, f.sum, f.rest)
	s.VSUBPS(f.rest, f.t, f.rest)
	s.VDIVPS(f.sum, s.one, f.over)
	return f
}

// quotient returns the sigmoid of x, or of -x: 1/(1+t) or t/(1+t). One Newton step corrects the rounding of the sum,
// the reciprocal and the product.
func (s sigmoid) quotient(x reg.VecVirtual, f fraction, negated bool) reg.VecVirtual {
	above, q := s.vec(), s.vec()
	var positive, negative reg.Register = s.one, f.t
	if negated {
		positive, negative = negative, positive
	}
	if s.wide {
		sign := s.K()
		s.VPMOVD2M(x, sign)
		s.VBLENDMPS(negative, positive, sign, above)
	} else {
		s.VBLENDVPS(x, negative, positive, above)
	}
	s.VMULPS(f.over, above, q)
	s.VFNMADD231PS(f.sum, q, above)
	s.VFNMADD231PS(f.rest, q, above)
	s.VFMADD231PS(f.over, above, q)
	return q
}

func (m machine) swiGLU() {
	n, a := m.elements("swiGLU", "y, gate, up", "")
	s := m.sigmoid()
	m.over(n, "", 1).each(func(p piece) {
		g := p.load(a[1])
		y := s.quotient(g, s.fraction(g), false)
		p.VMULPS(g, y, y)
		p.VMULPS(p.load(a[2]), y, y)
		p.store(y, a[0])
	})
	m.end()
}

// swiGLUBackward reads all of a vector before it writes, so that results may replace inputs.
func (m machine) swiGLUBackward() {
	n, a := m.elements("swiGLUBackward", "dgate, dup, dy, gate, up", "")
	s := m.sigmoid()
	m.over(n, "", 1).each(func(p piece) {
		g := p.load(a[3])
		f := s.fraction(g)
		sig, rest := s.quotient(g, f, false), s.quotient(g, f, true)
		dy, u := p.load(a[2]), p.load(a[4])
		p.VMULPS(dy, u, u)
		p.VMULPS(g, dy, dy)
		p.VMULPS(sig, dy, dy)
		p.VFMADD213PS(s.one, g, rest)
		p.VMULPS(sig, rest, rest)
		p.VMULPS(rest, u, u)
		p.store(u, a[0])
		p.store(dy, a[1])
	})
	m.end()
}

// adamW keeps the order of operations of torch.optim.AdamW and rounds each of them.
func (m machine) adamW() {
	n, a := m.elements("adamW", "p, grad, m, v", ", step *float32")
	step := m.argument("step")
	c := make([]reg.VecVirtual, 8) // the fields of AdamStep
	for i := range c {
		c[i] = m.vec()
		m.VBROADCASTSS(at(step, 4*i), c[i])
	}
	factor, new1, old2, new2, keep, rate, root, eps := c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]
	m.over(n, "", 1).each(func(p piece) {
		g, m1, m2, x := p.load(a[1]), p.load(a[2]), p.load(a[3]), p.load(a[0])
		p.VMULPS(factor, g, g)
		d := p.vec()
		p.VSUBPS(m1, g, d)
		p.VMULPS(new1, d, d)
		p.VADDPS(d, m1, m1)
		p.VMULPS(g, g, g)
		p.VMULPS(new2, g, g)
		p.VMULPS(old2, m2, m2)
		p.VADDPS(g, m2, m2)
		p.store(m1, a[2])
		p.store(m2, a[3])
		p.VSQRTPS(m2, m2)
		p.VDIVPS(root, m2, m2)
		p.VADDPS(eps, m2, m2)
		p.VMULPS(rate, m1, m1)
		p.VDIVPS(m2, m1, m1)
		p.VMULPS(keep, x, x)
		p.VSUBPS(m1, x, x)
		p.store(x, a[0])
	})
	m.end()
}

// halves emits conversions from and to 16 bits. The number of elements is a multiple of the lanes.
func halves(m machine) {
	m.narrow("toBF16", m.toBF16)
	m.narrow("toF16", func(v reg.VecVirtual, to Mem, _ bf16) { m.VCVTPS2PH(imm(0), v, to) })
	m.widen("fromBF16", func(from Mem, v reg.VecVirtual) {
		m.VPMOVZXWD(from, v)
		m.VPSLLD(imm(16), v, v)
	})
	m.widen("fromF16", func(from Mem, v reg.VecVirtual) { m.VCVTPH2PS(from, v) })
}

// short returns the memory of the 16-bit elements of p.
func (p piece) short(base reg.Register) Mem { return indexed(base, p.i, 2, 0) }

func (m machine) narrow(name string, convert func(v reg.VecVirtual, to Mem, c bf16)) {
	m.function(name, "n int, dst *uint16, src *float32")
	a := m.arguments("n", "dst", "src")
	c := bf16{m.bits(1), m.bits(0x7fff), m.bits(0x40 << 16)}
	m.over(a[0], "", 1).whole(func(p piece) { convert(p.load(a[2]), p.short(a[1]), c) })
	m.end()
}

func (m machine) widen(name string, convert func(from Mem, v reg.VecVirtual)) {
	m.function(name, "n int, dst *float32, src *uint16")
	a := m.arguments("n", "dst", "src")
	m.over(a[0], "", 1).whole(func(p piece) {
		v := p.vec()
		convert(p.short(a[2]), v)
		p.store(v, a[1])
	})
	m.end()
}

// toBF16 rounds to the nearest even: it adds 0x7fff plus the last kept bit, then keeps the upper 16 bits. NaN keeps its
// upper bits and gets the quiet bit.
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
	m.VPACKUSDW(odd, odd, odd) // packs each half of the vector separately: the result is in quadwords 0 and 2
	m.VPERMQ(imm(0b1000), odd, odd)
	m.VMOVUPS(odd.AsX(), to)
}

// bf16 holds the constants of toBF16.
type bf16 struct{ one, below, quiet Op }

// pack emits the functions that make panels.
func pack(m machine) {
	copyRows(m)
	if !m.wide {
		transpose8(m) // AVX-512 uses it also, since memory limits it
	}
}

func copyRows(m machine) {
	m.function("packRows", "dst, src *float32, ld, rows int")
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

// transpose8 transposes squares of 8 x 8: it interleaves pairs of rows by one, two and four elements.
func transpose8(m machine) {
	m.function("transpose8", "dst *float32, ldd int, src *float32, lds, squares int, scale float32")
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

// interleave joins registers whose numbers differ in one bit. The one without the bit gets the result's lower half.
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

// eightRows returns a function that computes the addresses of 8 rows, ld bytes apart.
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

// rows emits operations on one row of a head. They take full vectors; the caller computes the rest.
func rows(m machine) {
	scaled(m)
	dot(m)
}

// vectors emits a loop over n vectors. f gets the position in bytes.
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
	m.function("scaled", "dst, src *float32, n int, x float32")
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
	m.function("dot", "a, b *float32, n int, sums *float64")
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
