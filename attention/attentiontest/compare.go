package attentiontest

import (
	"fmt"
	"math"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// compare fails where got is further from want, the float64 result, than twice as far as
// plain is, plus floor; distances are over the largest |want| or, where that is more, over
// size. Positions that nothing touched must be equal, but for the rounding of Finish.
func compare(t testing.TB, name string, got, want, plain View, size, floor float64, touched []bool) {
	t.Helper()
	g, w, p := read(got), read(want), read(plain)
	scale := max(largest(w), size)
	allowed, left := 2*worst(p, w)/scale+floor, 0.0
	if got.DType().Size() < want.DType().Size() && got.DType().Size() == 2 {
		left = floor
	}
	report(t, name, want, g, w, scale, func(at [4]int) float64 {
		if name != "delta" && !touched[at[tensor.Seq]] {
			return left
		}
		return allowed
	})
}

// report fails where the distance of an element, over scale, is more than allowed, and says
// which came first and which is worst.
func report(t testing.TB, name string, shape View, got, want []float64, scale float64, allowed func(at [4]int) float64) {
	t.Helper()
	i, first, most := -1, "", 0.0
	each(shape, func(_ int64, at [4]int) {
		i++
		e, limit := difference(got[i], want[i])/scale, allowed(at)
		if !(e <= limit) && first == "" {
			first = fmt.Sprintf("%s[batch %d, seq %d, head %d, dim %d] = %v, want %v: off by %.3g of %.3g, allowed %.3g",
				name, at[0], at[1], at[2], at[3], got[i], want[i], e, scale, limit)
		}
		most = max(most, e)
	})
	if first != "" {
		t.Errorf("%s; worst error of %s %.3g", first, name, most)
	}
	if testing.Verbose() {
		t.Logf("%s: worst error %.3g", name, most)
	}
}

// difference is |a - b|; equal infinities differ by 0, and NaN is always far away.
func difference(a, b float64) float64 {
	if a == b {
		return 0
	}
	d := math.Abs(a - b)
	if math.IsNaN(d) {
		return math.Inf(1)
	}
	return d
}

// termSizes says how large dq and dk would be if P * (dP - delta) did not cancel, as it does
// in a row that sees one key: the root of the sum of squares of an element's terms, at its
// largest. It is what the rounding of such a sum is relative to.
func (c Case) termSizes(in inputs, oracle *set) (dq, dk float64) {
	lse, delta := read(oracle.acc.LSE), read(oracle.delta)
	sumQ, sumK := make([]float64, len(in.q)), make([]float64, len(in.k))
	c.eachPair(func(b, i, h, j int) {
		row, key := (b*c.SeqQ+i)*c.Heads+h, (b*c.SeqK+j)*c.KVHeads+h/(c.Heads/c.KVHeads)
		q, k := in.q[row*c.Dim:][:c.Dim], in.k[key*c.Dim:][:c.Dim]
		score, dp := 0.0, 0.0
		for d := range q {
			score += c.Softmax.Scale * q[d] * k[d]
		}
		if limit := c.Softmax.Softcap; limit > 0 {
			score = limit * math.Tanh(score/limit)
		}
		score += c.extra(in, b, i, h, j)
		for d, x := range in.v[key*c.DimV:][:c.DimV] {
			dp += x * in.do[row*c.DimV+d]
		}
		ds := c.Softmax.Scale * math.Exp(score-lse[row]) * (math.Abs(dp) + math.Abs(delta[row]))
		for d := range q {
			sumQ[row*c.Dim+d] += ds * ds * k[d] * k[d]
			sumK[key*c.Dim+d] += ds * ds * q[d] * q[d]
		}
	})
	return math.Sqrt(largest(sumQ)), math.Sqrt(largest(sumK))
}

// eachPair visits the visible pairs of a case.
func (c Case) eachPair(visit func(b, i, h, j int)) {
	for _, t := range c.Tiles {
		for i := t.Q.Lo; i < t.Q.Hi; i++ {
			for j := t.K.Lo; j < t.K.Hi; j++ {
				for h := 0; t.Band.Sees(i, j) && h < c.Batch*c.Heads; h++ {
					visit(h/c.Heads, i, h%c.Heads, j)
				}
			}
		}
	}
}

// largest is the largest finite absolute value, 1 where there is none but 0.
func largest(xs []float64) float64 {
	most := 0.0
	for _, x := range xs {
		if a := math.Abs(x); a > most && !math.IsInf(a, 1) {
			most = a
		}
	}
	if most == 0 {
		return 1
	}
	return most
}

func worst(got, want []float64) float64 {
	most := 0.0
	for i := range got {
		most = max(most, difference(got[i], want[i]))
	}
	return most
}
