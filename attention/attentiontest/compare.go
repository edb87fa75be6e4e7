package attentiontest

import (
	"math"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// compare fails if got is further from want, the float64 result, than twice the distance of plain, plus floor.
// Distances are over the largest |want|, or over size if that is more. Untouched positions must be equal, except for
// the rounding of End.
func compare(t testing.TB, name string, got, want, plain tensor.View, size, floor float64, touched []bool) {
	t.Helper()
	g, w := read(got), read(want)
	if len(g) == 0 && got.Shape() == want.Shape() {
		return
	}
	scale := max(largest(w), size)
	least, err := near.Of(read(plain), w, near.Infinities)
	if err != nil {
		t.Errorf("the %s to compare with: %v", name, err)
	}
	allowed, left := 2*least.Abs/scale+floor, 0.0
	if got.DType().Size() < want.DType().Size() && got.DType().Size() == 2 {
		left = floor
	}
	n := want.Shape()
	report(t, name, want, g, w, scale, func(i int) float64 {
		if name != "delta" && !touched[i/n[3]/n[2]%n[1]] {
			return left
		}
		return allowed
	})
}

// report fails if an element of got is further from want than its allowed share of scale. Equal infinities agree: rows
// without a key have an LSE of -Inf.
func report(t testing.TB, name string, shape tensor.View, got, want []float64, scale float64,
	allowed func(i int) float64) {
	t.Helper()
	if err := near.Each(got, want, near.Infinities, func(i int) float64 { return scale * allowed(i) }); err != nil {
		t.Errorf("%s of shape %v, size %.3g: %v", name, shape.Shape(), scale, err)
	}
	if d, err := near.Of(got, want, near.Infinities); err == nil && testing.Verbose() {
		t.Logf("%s: worst error %.3g", name, d.Abs/scale)
	}
}

// termSizes returns the largest root of the sum of squares of the terms of an element of dq and of dk, as if
// P * (dP - delta) did not cancel. (It cancels in a row that sees one key.) The rounding of such a sum is relative to
// it.
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

// Slopes compares dx, the gradient of loss by x, with central differences, all in float64.
func Slopes(t testing.TB, name string, x, dx tensor.View, tolerance float64, loss func() float64) {
	t.Helper()
	const h = 1e-5
	xs := tensor.Data[float64](x)
	want := make([]float64, len(xs))
	for i, at := range xs {
		xs[i] = at + h
		want[i] = loss()
		xs[i] = at - h
		want[i] = (want[i] - loss()) / (2 * h)
		xs[i] = at
	}
	allowed := func(i int) float64 { return tolerance * max(1, math.Abs(want[i])) }
	if err := near.Each(tensor.Data[float64](dx), want, near.Finite, allowed); err != nil {
		t.Fatalf("%s and the difference quotients: %v", name, err)
	}
}

// largest returns the largest finite absolute value, or 1 if all values are 0 or not finite.
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
