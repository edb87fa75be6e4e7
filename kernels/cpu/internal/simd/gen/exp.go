package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// exponential holds the constants of e^x = 2^n e^r, with n = round(x / ln 2) and r = x - n ln 2 in [-ln2/2, ln2/2].
// ln 2 is in two parts; the first has so few bits that x - n*ln2Hi is exact. The polynomial 1 + r + r^2 q(r) is minimax
// in the relative error, 4e-9.
type exponential struct {
	machine
	least, most  reg.Register
	bias, one    reg.Register
	log2e        Op
	ln2Hi, ln2Lo Op
	q            []Op // from the highest power
}

const (
	expLeast = -104 // e to it rounds to 0
	expMost  = 89   // e to it is above all float32
	ln2Hi    = 0.693359375
)

// A small number plus expBias is that number rounded; its low bits are n + 254, twice the exponent's bias.
const expBias = 3<<22 + 254

// of q, from r^4 down
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
	e.VMINPS(x, e.most, x) // of two, of which one is NaN, these take the first
	e.ofSmall(x)
}

// ofSmall is of for x that are at most expMost.
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
	// In two steps, since 2^n may have no exponent of its own if the result is subnormal: the low bits are
	// n + 254; half of them and the rest go to the exponents of two factors.
	e.VPSRLD(imm(1), n, whole)
	e.VPSUBD(whole, n, n)
	e.VPSLLD(imm(23), n, n)
	e.VPSLLD(imm(23), whole, whole)
	e.VMULPS(n, y, y)
	e.VMULPS(whole, y, x)
}

// loss emits what a softmax over a row consists of.
func loss(m machine) {
	m.maxOf()
	m.expSum("expSum", true)
	m.expSum("sumExp", false)
}

func (m machine) maxOf() {
	const unroll = 4
	m.function("maxOf", "n int, x *float32) (top float32", "is the largest of x, NaN left out; see MaxOf.")
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

// maxOfVector puts the largest element of v, which has no NaN, in the lowest.
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

// expSum emits the sum of e^(x-top), and stores the summands or not. It computes for so long that it can prefetch the
// data after x, a cache line at a time: the next row of logits.
func (m machine) expSum(name string, store bool) {
	const unroll = 2
	params := "n int, dst, x *float32, top float32) (sum float64"
	if !store {
		params = "n int, x *float32, top float32) (sum float64"
	}
	m.function(name, params, "adds up e^(x-top); see "+exported(name)+".")
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

// rounded returns the float32 of the lowest float64 of v, in all elements of a vector.
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

// double returns the float64 at from, in the lowest element of a vector.
func (m machine) double(from Mem) reg.VecVirtual {
	v := m.vec()
	m.VMOVSD(from, v.AsX())
	return v
}

// one64 returns the float64 1.
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
