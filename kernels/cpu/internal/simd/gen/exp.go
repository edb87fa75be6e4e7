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
