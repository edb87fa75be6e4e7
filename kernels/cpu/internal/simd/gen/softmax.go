package main

import (
	"math"
	"strconv"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// softmax emits attention's operations on a tile of scores: rows are keys, columns queries. A vector holds one key's
// scores of several queries, so no operation sums within a vector.
func softmax(m machine) {
	shrinkColumns(m)
	probabilities(m)
	gradScores(m)
	band(m)
}

// exp2 holds the constants of 2^x = 2^n p(x-n), with n = floor(x). p is a minimax polynomial with p(0) = 1; its error
// is below 1.1 units in the last place.
type exp2 struct {
	m            machine
	least, most  reg.Register // with AVX2 only
	coefficients []Op
}

var exp2Poly = []float32{2.1612914861179888e-4, 1.2467846972867846e-3, 9.675451554358006e-3, 5.5485282093286514e-2,
	2.402293086051941e-1, 6.931470632553101e-1, 1}

// exp2Bias plus an integer n from -127 to 128 is a float32 with the low bits n+127.
const exp2Bias = 1<<23 + 127

// newExp2 loads the constants. AVX2 has no instruction that multiplies by 2^n, so n+127 becomes the exponent bits. At
// n = -127 they are 0 and the result is 0: AVX2 has no subnormal results. bounded promises that x is at most 128.
func newExp2(m machine, bounded bool) *exp2 {
	e := &exp2{m: m}
	if !m.wide {
		e.least = m.register(-127)
		if !bounded {
			e.most = m.register(128)
		}
	}
	for _, c := range exp2Poly {
		e.coefficients = append(e.coefficients, m.constant(c))
	}
	return e
}

// replace sets each vector of x to 2^x and keeps NaN. It interleaves the vectors' steps, to hide latency and to load
// each constant once. With AVX-512, VREDUCEPS computes x - floor(x), which is 0 for infinities, and VSCALEFPS
// multiplies by 2^floor(x).
func (e *exp2) replace(x ...reg.Register) {
	m := e.m
	n, p := make([]reg.Register, len(x)), make([]reg.Register, len(x))
	each := func(f func(i int)) {
		for i := range x {
			f(i)
		}
	}
	const down = 1 // rounding towards -Inf
	each(func(i int) { n[i] = m.vec() })
	if m.wide {
		each(func(i int) { m.VREDUCEPS(U8(down), x[i], n[i]) })
		e.polynomials(n, p)
		each(func(i int) { m.VSCALEFPS(x[i], p[i], x[i]) })
		return
	}
	each(func(i int) { m.VMAXPS(x[i], e.least, x[i]) }) // keeps NaN: if x is NaN, the result is x
	if e.most != nil {
		each(func(i int) { m.VMINPS(x[i], e.most, x[i]) })
	}
	each(func(i int) { m.VROUNDPS(U8(down), x[i], n[i]) })
	each(func(i int) { m.VSUBPS(n[i], x[i], x[i]) })
	e.polynomials(x, p)
	bias := m.vec()
	m.VMOVUPS(m.memory(exp2Bias), bias)
	each(func(i int) { m.VADDPS(bias, n[i], n[i]) })
	each(func(i int) { m.VPSLLD(U8(23), n[i], n[i]) })
	each(func(i int) { m.VMULPS(n[i], p[i], x[i]) })
}

// polynomials sets each of p to p(x).
func (e *exp2) polynomials(x, p []reg.Register) {
	m := e.m
	first := e.coefficients[0]
	for i := range p {
		p[i] = m.vec()
		m.VMOVAPS(first, p[i])
		first = p[0]
	}
	for _, c := range e.coefficients[1:] {
		if !m.wide && len(x) > 1 {
			v := m.vec()
			m.VMOVUPS(c, v)
			c = v
		}
		for i := range x {
			m.VFMADD213PS(c, x[i], p[i])
		}
	}
}

// columns emits a loop over the vectors of a row. f gets the position in bytes.
func (m machine) columns(f func(x reg.Register)) {
	x, cols := m.GP64(), m.argument("cols")
	m.SHLQ(U8(2), cols)
	m.XORQ(x, x)
	m.Label("columns")
	f(x)
	m.ADDQ(imm(m.bytes()), x)
	m.CMPQ(x, cols)
	m.JL(LabelRef("columns"))
}

// down emits a loop over the keys for each number of rows in turns, largest first, while that many rows remain.
func (m machine) down(label string, turns []int, turn func(rows int)) {
	keys := m.argument("keys")
	for _, n := range turns {
		top, end := label+strconv.Itoa(n), label+"End"+strconv.Itoa(n)
		m.Label(top)
		m.CMPQ(keys, imm(n))
		m.JL(LabelRef(end))
		turn(n)
		m.SUBQ(imm(n), keys)
		m.JMP(LabelRef(top))
		m.Label(end)
	}
}

// oneByOne returns an iteration that emits f and next for each row.
func oneByOne(f func(i int), next func()) func(rows int) {
	return func(rows int) {
		for i := range rows {
			f(i)
			next()
		}
	}
}

// expGroup is the number of vectors whose exponentials interleave; more would not fit the registers. An iteration has
// full groups and an even number of rows.
const expGroup = 3

var expTurns = []int{2 * expGroup, 2, 1}

// exponentials replaces the scores of the column at row by 2^(score - from) and calls then for each.
func (m machine) exponentials(e *exp2, row, ld, from reg.Register, then func(i int, x reg.Register)) {
	m.down("exp", expTurns, func(rows int) {
		for begin := 0; begin < rows; begin += expGroup {
			n := min(expGroup, rows-begin)
			x := make([]reg.Register, n)
			for i := range x {
				x[i] = m.vec()
				m.VMOVUPS(rowAt(row, ld, i), x[i])
				m.VSUBPS(from, x[i], x[i])
			}
			e.replace(x...)
			for i := range x {
				m.VMOVUPS(x[i], rowAt(row, ld, i))
				then(begin+i, x[i])
			}
			m.LEAQ(rowAt(row, ld, n-1), row)
			m.ADDQ(ld, row)
		}
	})
}

// rowAt returns the memory i rows after row; i is at most 2.
func rowAt(row, ld reg.Register, i int) Mem {
	if i == 0 {
		return at(row, 0)
	}
	return indexed(row, ld, uint8(i), 0)
}

func shrinkColumns(m machine) {
	m.function("softmax", "s *float32, ld, keys, cols int, top *float32, sum *float64, shrink *float32")
	s, ld := m.argument("s"), m.argument("ld")
	m.SHLQ(U8(2), ld)
	e := newExp2(m, true)
	infinity := m.constant(float32(math.Inf(-1)))
	m.columns(func(x reg.Register) {
		row := m.GP64()
		m.LEAQ(indexed(s, x, 1, 0), row)
		const chains = 4
		var best [chains]reg.Register
		for i := range best {
			best[i] = m.vec()
			m.VMOVAPS(infinity, best[i])
		}
		m.down("max", []int{chains, 1}, oneByOne(func(i int) { m.VMAXPS(at(row, 0), best[i], best[i]) },
			func() { m.ADDQ(ld, row) }))
		m.VMAXPS(best[1], best[0], best[0])
		m.VMAXPS(best[3], best[2], best[2])
		m.VMAXPS(best[2], best[0], best[0])

		top := m.argument("top")
		old, now := m.vec(), best[0]
		m.VMOVUPS(indexed(top, x, 1, 0), old)
		m.VMAXPS(old, now, now)
		m.VMOVUPS(now, indexed(top, x, 1, 0))
		m.zeroWhere(now, infinity)
		m.VSUBPS(now, old, old)
		e.replace(old)
		m.VMOVUPS(old, indexed(m.argument("shrink"), x, 1, 0))

		m.LEAQ(indexed(s, x, 1, 0), row)
		var total [2]reg.Register
		for i := range total {
			total[i] = m.vec()
			m.zero(total[i])
		}
		m.exponentials(e, row, ld, now, func(i int, x reg.Register) { m.VADDPS(x, total[i%2], total[i%2]) })
		m.VADDPS(total[1], total[0], total[0])
		m.foldSum(x, old, total[0])
	})
	m.end()
}

// foldSum sets sum to sum*shrink + total, in float64. x is the position in float32 arrays.
func (m machine) foldSum(x, shrink, total reg.Register) {
	sum := m.argument("sum")
	half := func(v reg.Register, n int) reg.Register {
		wide, from := m.vec(), m.half(v.(reg.VecVirtual))
		switch upper := m.vec(); {
		case n == 0:
		case m.wide:
			from = upper.AsY()
			m.VEXTRACTF32X8(U8(1), v, from)
		default:
			from = upper.AsX()
			m.VEXTRACTF128(U8(1), v, from)
		}
		m.VCVTPS2PD(from, wide)
		return wide
	}
	for n := range 2 {
		a, b := half(shrink, n), half(total, n)
		m.VFMADD132PD(indexed(sum, x, 2, n*m.bytes()), b, a)
		m.VMOVUPD(a, indexed(sum, x, 2, n*m.bytes()))
	}
}

func probabilities(m machine) {
	m.function("probabilities", "s *float32, ld, keys, cols int, lse *float32")
	s, ld := m.argument("s"), m.argument("ld")
	m.SHLQ(U8(2), ld)
	e := newExp2(m, false)
	m.columns(func(x reg.Register) {
		row, lse := m.GP64(), m.vec()
		m.LEAQ(indexed(s, x, 1, 0), row)
		m.VMOVUPS(indexed(m.argument("lse"), x, 1, 0), lse)
		m.exponentials(e, row, ld, lse, func(int, reg.Register) {})
	})
	m.end()
}

func gradScores(m machine) {
	m.function("gradScores", "dp, p *float32, ld, keys, cols int, delta *float32, scale float32")
	dp, p, ld := m.argument("dp"), m.argument("p"), m.argument("ld")
	m.SHLQ(U8(2), ld)
	scale := m.vec()
	m.VBROADCASTSS(m.address("scale"), scale)
	m.columns(func(x reg.Register) {
		to, from, delta := m.GP64(), m.GP64(), m.vec()
		m.LEAQ(indexed(dp, x, 1, 0), to)
		m.LEAQ(indexed(p, x, 1, 0), from)
		m.VMOVUPS(indexed(m.argument("delta"), x, 1, 0), delta)
		m.down("grad", []int{4, 1}, oneByOne(func(int) {
			v := m.vec()
			m.VMOVUPS(at(to, 0), v)
			m.VSUBPS(delta, v, v)
			m.VMULPS(scale, v, v)
			m.VMULPS(at(from, 0), v, v)
			m.VMOVUPS(v, at(to, 0))
		}, func() {
			m.ADDQ(ld, to)
			m.ADDQ(ld, from)
		}))
	})
	m.end()
}

// band emits the masking of scores: row j keeps the columns from lo+j to hi+j, and the others become x.
func band(m machine) {
	m.function("band", "s *float32, ld, keys, cols, lo, hi int, x float32")
	s, ld := m.argument("s"), m.argument("ld")
	m.SHLQ(U8(2), ld)
	hidden, step := m.vec(), m.words(1)
	m.VBROADCASTSS(m.address("x"), hidden)
	m.columns(func(x reg.Register) {
		row, index := m.GP64(), m.GP64()
		m.LEAQ(indexed(s, x, 1, 0), row)
		// below counts lo+j-i and above i-hi-j: a score is hidden where one of them is above 0.
		iota, first, below, above := m.vec(), m.vec(), m.vec(), m.vec()
		m.VMOVUPS(m.iota(), iota)
		m.MOVQ(x, index)
		m.SHRQ(U8(2), index)
		m.splat(index, first)
		m.VPADDD(first, iota, iota)
		m.splat(m.argument("lo"), below)
		m.VPSUBD(iota, below, below)
		m.splat(m.argument("hi"), above)
		m.VPSUBD(above, iota, above)
		m.down("row", []int{1}, oneByOne(func(int) {
			m.storeWhereAbove(hidden, below, above, at(row, 0))
			m.VPADDD(step, below, below)
			m.VPSUBD(step, above, above)
		}, func() { m.ADDQ(ld, row) }))
	})
	m.end()
}
