package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// norm emits the sum of squares and the normalisation by it. Sums are in float64.
func norm(m machine) {
	m.function("sumSquares", "n int, x *float32) (sum float64", "adds up the squares of x; see SumSquares.")
	a := m.arguments("n", "x")
	m.VMOVSD(m.squares(a[0], a[1]).AsX(), m.result("sum"))
	m.end()

	m.rmsNorm()
	m.rmsNormBackward("rmsNormBackward", false)
	m.rmsNormBackward("rmsNormBackwardAdd", true)
}

// squares is the sum of the squares of n elements at x.
func (m machine) squares(n, x reg.Register) reg.VecVirtual {
	const unroll = 4
	sums := m.zeros(unroll)
	m.over(n, "squares", unroll).each(func(p piece) {
		for i, d := range p.loadDoubles(x) {
			p.VFMADD231PD(d, d, sums[p.u][i])
		}
	})
	return m.sum(sums)
}

// rounded is the float32 of the lowest float64 of v, in all elements of a vector.
func (m machine) rounded(v reg.VecVirtual) reg.VecVirtual {
	to := m.vec()
	m.VCVTSD2SS(v.AsX(), v.AsX(), to.AsX())
	m.VBROADCASTSS(to.AsX(), to)
	return to
}

func (m machine) rmsNorm() {
	m.function("rmsNorm", "rows, n int, y, inv, x, w *float32, eps float64", "normalises rows; see RMSNorm.")
	a := m.arguments("n", "y", "inv", "x", "w", "rows")
	n, y, inv, x, w, rows := a[0], a[1], a[2], a[3], a[4], a[5]
	eps, count, one := m.double(m.address("eps")), m.vec(), m.double(m.one64())
	m.zero(count)
	m.VCVTSI2SDQ(n, count.AsX(), count.AsX())
	m.eachRow(rows, func() {
		mean := m.squares(n, x)
		m.VDIVSD(count.AsX(), mean.AsX(), mean.AsX())
		m.VADDSD(eps.AsX(), mean.AsX(), mean.AsX())
		m.VSQRTSD(mean.AsX(), mean.AsX(), mean.AsX())
		m.VDIVSD(mean.AsX(), one.AsX(), mean.AsX())
		scale := m.rounded(mean)
		m.VMOVSS(scale.AsX(), at(inv, 0))
		m.over(n, "scale", 2).each(func(p piece) {
			v := p.load(x)
			p.VMULPS(scale, v, v)
			p.VMULPS(p.load(w), v, v)
			p.store(v, y)
		})
		m.ADDQ(imm(4), inv)
		m.LEAQ(indexed(x, n, 4, 0), x)
		m.LEAQ(indexed(y, n, 4, 0), y)
	})
	m.end()
}

// double is the float64 at from, in the lowest element of a vector.
func (m machine) double(from Mem) reg.VecVirtual {
	v := m.vec()
	m.VMOVSD(from, v.AsX())
	return v
}

// one64 is the float64 1.
func (m machine) one64() Mem {
	return m.data("one", func(i int) Constant { return U32(uint32(i%2) * 0x3ff00000) })
}

// rmsNormBackward emits the gradients of rows; see RMSNormBackward.
func (m machine) rmsNormBackward(name string, add bool) {
	m.function(name, "rows, n int, dx *float32, dw *float64, dy, x, inv, w *float32",
		"is the gradient of rows; see RMSNormBackward.")
	a := m.arguments("n", "dx", "dw", "dy", "x", "inv", "w", "rows")
	n, dx, dw, dy, x, inv, w, rows := a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
	count := m.vec()
	m.zero(count)
	m.VCVTSI2SDQ(n, count.AsX(), count.AsX())
	m.eachRow(rows, func() {
		scale := m.vec()
		m.VBROADCASTSS(at(inv, 0), scale)
		back := m.dots(n, dw, dy, x, w, scale)
		scale64 := m.vec()
		m.VCVTSS2SD(scale.AsX(), scale.AsX(), scale64.AsX())
		for range 3 {
			m.VMULSD(scale64.AsX(), back.AsX(), back.AsX())
		}
		m.VDIVSD(count.AsX(), back.AsX(), back.AsX())
		factor := m.rounded(back)
		m.over(n, "dx", 2).each(func(p piece) {
			d, v := p.load(dy), p.load(x)
			p.VMULPS(p.load(w), d, d)
			p.VMULPS(scale, d, d)
			p.VMULPS(factor, v, v)
			p.VSUBPS(v, d, d)
			if add {
				p.VADDPS(p.load(dx), d, d)
			}
			p.store(d, dx)
		})
		m.ADDQ(imm(4), inv)
		for _, row := range []reg.Register{dx, dy, x} {
			m.LEAQ(indexed(row, n, 4, 0), row)
		}
	})
	m.end()
}

// dots adds dy*x*inv to dw and is the sum of dy*x*w.
func (m machine) dots(n, dw, dy, x, w reg.Register, inv reg.VecVirtual) reg.VecVirtual {
	const unroll = 2
	sums, inv64 := m.zeros(unroll), m.vec()
	m.VCVTPS2PD(m.half(inv), inv64)
	m.over(n, "dot", unroll).each(func(p piece) {
		d, v := p.loadDoubles(dy), p.loadDoubles(x)
		for i := range d {
			p.VMULPD(v[i], d[i], d[i])
		}
		p.addDoubles(dw, d, inv64)
		for i, weight := range p.loadDoubles(w) {
			p.VFMADD231PD(weight, d[i], sums[p.u][i])
		}
	})
	return m.sum(sums)
}

// turn emits the rotation of the heads of one row; see Turn.
func (m machine) turn() {
	m.function("turn", "heads, half int, y, x, cos, sin *float32, sign float32", "turns heads; see Turn.")
	a := m.arguments("heads", "half", "y", "x", "cos", "sin")
	heads, half, y, x, cos, sin := a[0], a[1], a[2], a[3], a[4], a[5]
	sign := m.broadcast("sign")
	x2, y2 := m.GP64(), m.GP64()
	m.eachRow(heads, func() {
		m.LEAQ(indexed(x, half, 4, 0), x2)
		m.LEAQ(indexed(y, half, 4, 0), y2)
		m.over(half, "turn", 1).each(func(p piece) {
			c, s, a, b := p.load(cos), p.load(sin), p.load(x), p.load(x2)
			p.VMULPS(sign, s, s)
			ac, as, bc, bs := p.vec(), p.vec(), p.vec(), p.vec()
			p.VMULPS(c, a, ac)
			p.VMULPS(s, a, as)
			p.VMULPS(c, b, bc)
			p.VMULPS(s, b, bs)
			p.VSUBPS(bs, ac, ac)
			p.VADDPS(as, bc, bc)
			p.store(ac, y)
			p.store(bc, y2)
		})
		m.LEAQ(indexed(x2, half, 4, 0), x)
		m.LEAQ(indexed(y2, half, 4, 0), y)
	})
	m.end()
}
