package delta

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// TestGradients holds every gradient against central differences of sum(o * do) + sum(S' * dstate), with S' the state
// after the segment.
func TestGradients(t *testing.T) {
	const batch, seq, keyHeads, heads, dim, dimV = 2, 6, 2, 4, 3, 2
	rng := rand.New(rand.NewPCG(1, 2))
	draw := func(shape ...int) View {
		v := tensor.New(tensor.F64, shape...)
		for i := range tensor.Data[float64](v) {
			tensor.Data[float64](v)[i] = rng.NormFloat64()
		}
		return v
	}
	keys := func() View { return draw(batch, seq, keyHeads, dim) }
	values := func(dim int) View { return draw(batch, seq, heads, dim) }
	state := func(cols int) View { return draw(batch, heads, dim, cols) }
	a := Args{Q: keys(), K: keys(), V: values(dimV), G: values(1), Beta: values(1), DO: values(dimV),
		State: state(dimV), DState: state(dimV), Maps: state(dim + dimV), DMaps: state(dim + dimV), O: values(dimV),
		DQ: keys(), DK: keys(), DV: values(dimV), DG: values(1), DBeta: values(1), Scale: 0.7,
		Segments: []Segment{{Lo: 1, Hi: 5}}}
	after, before := state(dimV), state(dimV)
	var r Reference
	must := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	loss := func() float64 {
		must(r.Forward(a), r.Summarize(a), r.Compose(after, a.Maps, a.State))
		part := func(v View) []float64 { return near.Decode(v.Slice(tensor.Seq, 1, 5)) }
		return dot(part(a.O), part(a.DO)) + dot(near.Decode(after), near.Decode(a.DState))
	}
	must(r.Backward(a), r.SummarizeBackward(a), r.Compose(before, a.DMaps, a.DState))
	for _, g := range []struct {
		name  string
		x, dx View
		rows  bool
	}{{"q", a.Q, a.DQ, true}, {"k", a.K, a.DK, true}, {"v", a.V, a.DV, true}, {"g", a.G, a.DG, true},
		{"beta", a.Beta, a.DBeta, true}, {"state", a.State, before, false}} {
		x, dx := tensor.Data[float64](g.x), tensor.Data[float64](g.dx)
		for i := range x {
			if row := i / g.x.Cols() % seq; g.rows && (row < 1 || row >= 5) {
				continue
			}
			const h = 1e-5
			at := x[i]
			x[i] = at + h
			up := loss()
			x[i] = at - h
			down := loss()
			x[i] = at
			if want := (up - down) / (2 * h); !(math.Abs(dx[i]-want) <= 1e-7*(1+math.Abs(want))) {
				t.Fatalf("d%s[%d] = %v, the difference quotient is %v", g.name, i, dx[i], want)
			}
		}
	}
}
