package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// exponential holds the constants of e^x = 2^n e^r, with n = round(x / ln 2) and r = x - n ln 2 in [-ln2/2, ln2/2].
// ln 2 is split in two; the first part is short enough that x - n*ln2Hi is exact. The polynomial 1 + r + r^2 q(r) is
// minimax in the relative error, 4e-9.
type exponential struct {
	machine
	least, most  reg.Register
	bias, one    reg.Register
	log2e        Op
	ln2Hi, ln2Lo Op
	q            []Op // coefficients, highest power first
}

const (
	expLeast = -104 // e^expLeast rounds to 0
	expMost  = 89   // e^expMost overflows float32
	ln2Hi    = 0.693359375
)

// expBias, added to a small number, rounds it to an integer n. The low bits of the sum are n + 254, twice the bias of
// the exponent.
const expBias = 3<<22 + 254

// expPoly are the coefficients of q, from r^4 down.
var expPoly = []float32{0x1.6a2256p-10, 0x1.123b02p-7, 0x1.5558f8p-5, 0x1.55549p-3, 0x1.fffffcp-2}

func (m machine) exponential() exponential {
	e := exponential{machine: m,
		least: m.register(expLeast), most: m.register(expMost), bias: m.register(expBias), one: m.register(1),
		log2e: m.constant(math.Log2E), ln2Hi: m.constant(ln2Hi), ln2Lo: m.constant(math.Ln2 - ln2Hi)}
	for _, c := range expPoly {
		e.q = append(e.q, m.constant(c))
	}
	return e
}

// of replaces x by e^x. NaN stays NaN.
func (e exponential) of(x reg.VecVirtual) {
	e.VMINPS(x, e.most, x) // if one operand is NaN, VMINPS and VMAXPS return the first
	e.ofSmall(x)
}

// ofSmall does the same for x up to expMost.
func (e exponential) ofSmall(x reg.VecVirtual) {
	e.VMAXPS(x, e.least, x)
	n, y := e.vec(), e.vec()
	e.VMOVAPS(e.bias, n)
	e.VFMADD231PS(e.log2e, x, n)
	whole := e.vec()
	e.VSUBPS(e.bias, n, whole)
	e.VFNMADD231PS(e.ln2Hi, whole, x)
	e.VFNMADD231PS(e.ln2Lo, whole, x)
	e.VMOVUPS(e.q[0], y)
	for _, q := range e.q[1:] {
		e.VFMADD213PS(q, x, y)
	}
	e.VFMADD213PS(e.one, x, y)
	e.VFMADD213PS(e.one, x, y)
	if e.wide {
		e.VSCALEFPS(whole, y, x)
		return
	}
	// Two factors, since 2^n is below the smallest normal number if the result is subnormal. The low bits are n + 254:
	// one half becomes the exponent of the first factor, the rest that of the second.
	e.VPSRLD(imm(1), n, whole)
	e.VPSUBD(whole, n, n)
	e.VPSLLD(imm(23), n, n)
	e.VPSLLD(imm(23), whole, whole)
	e.VMULPS(n, y, y)
	e.VMULPS(whole, y, x)
}

// loss emits the parts of a softmax over a row.
func loss(m machine) {
	m.maxOf()
	m.expSum("expSum", true)
	m.expSum("sumExp", false)
}

func (m machine) maxOf() {
	const unroll = 4
	m.function("maxOf", "n int, x *float32) (top float32")
	a := m.arguments("n", "x")
	least := m.register(float32(math.Inf(-1)))
	top := make([]reg.VecVirtual, unroll)
	for i := range top {
		top[i] = m.vec()
		m.VMOVAPS(least, top[i])
	}
	m.over(a[0], "", unroll).each(func(p piece) {
		x := p.load(a[1])
		p.orElse(x, least)
		p.VMAXPS(top[p.u], x, top[p.u])
	})
	for i := range unroll / 2 {
		m.VMAXPS(top[i], top[i+2], top[i])
	}
	m.VMAXPS(top[0], top[1], top[0])
	m.maxOfVector(top[0])
	m.VMOVSS(top[0].AsX(), m.result("top"))
	m.end()
}

// maxOfVector moves the largest element of v to the lowest. v has no NaN.
func (m machine) maxOfVector(v reg.VecVirtual) {
	t := m.vec()
	m.upper(v, t)
	if m.wide {
		m.VMAXPS(t.AsY(), v.AsY(), v.AsY())
		m.VEXTRACTF32X4(imm(1), v.AsY(), t.AsX())
	}
	m.VMAXPS(t.AsX(), v.AsX(), v.AsX())
	for _, shuffle := range []int{0b1110, 0b01} {
		m.VPERMILPS(imm(shuffle), v.AsX(), t.AsX())
		m.VMAXPS(t.AsX(), v.AsX(), v.AsX())
	}
}

// expSum emits the sum of e^(x-top); with store, it also stores the summands. It prefetches the data after x, the next
// row of logits, a cache line at a time.
func (m machine) expSum(name string, store bool) {
	const unroll = 2
	params := "n int, dst, x *float32, top float32) (sum float64"
	if !store {
		params = "n int, x *float32, top float32) (sum float64"
	}
	m.function(name, params)
	n, x := m.argument("n"), m.argument("x")
	var dst reg.Register
	if store {
		dst = m.argument("dst")
	}
	top := m.broadcast("top")
	next := m.GP64()
	m.LEAQ(indexed(x, n, 4, 0), next)
	e, sums, zero := m.exponential(), m.zeros(unroll), m.vec()
	m.zero(zero)
	m.over(n, "", unroll).each(func(p piece) {
		v := p.load(x)
		if p.wide || p.u == 0 {
			p.PREFETCHT0(p.memory(next))
		}
		p.VSUBPS(top, v, v)
		e.of(v)
		if store {
			p.store(v, dst)
		}
		p.orElse(v, zero)
		for i, d := range p.doubles(v) {
			p.VADDPD(d, sums[p.u][i], sums[p.u][i])
		}
	})
	m.VMOVSD(m.sum(sums).AsX(), m.result("sum"))
	m.end()
}

// norm emits the sum of squares and RMSNorm. Sums are in float64.
func norm(m machine) {
	m.function("sumSquares", "n int, x *float32) (sum float64")
	a := m.arguments("n", "x")
	m.VMOVSD(m.squares(a[0], a[1]).AsX(), m.result("sum"))
	m.end()

	m.rmsNorm()
	m.rmsGrad("rmsGrad", false)
	m.rmsGrad("rmsGradAdd", true)
}

// squares returns the sum of the squares of n elements at x.
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

// rounded rounds the lowest float64 of v to float32 and broadcasts it.
func (m machine) rounded(v reg.VecVirtual) reg.VecVirtual {
	to := m.vec()
	m.VCVTSD2SS(v.AsX(), v.AsX(), to.AsX())
	m.VBROADCASTSS(to.AsX(), to)
	return to
}

func (m machine) rmsNorm() {
	m.function("rmsNorm", "rows, n int, y, inv, x, w *float32, eps float64")
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

// double loads a float64 into the lowest element of a vector.
func (m machine) double(from Mem) reg.VecVirtual {
	v := m.vec()
	m.VMOVSD(from, v.AsX())
	return v
}

// one64 returns memory with the float64 1.
func (m machine) one64() Mem {
	return m.data("one", func(i int) Constant { return U32(uint32(i%2) * 0x3ff00000) })
}

// rmsGrad emits RMSNormBackward.
func (m machine) rmsGrad(name string, add bool) {
	m.function(name, "rows, n int, dx *float32, dw *float64, dy, x, inv, w *float32")
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

// dots adds dy*x*inv to dw and returns the sum of dy*x*w.
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

// turn emits the rotation (RoPE) of the heads of one row.
func (m machine) turn() {
	m.function("turn", "heads, half int, y, x, cos, sin *float32, sign float32")
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
