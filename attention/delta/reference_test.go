package delta

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention/attentiontest"
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
	zeros := func(like View) View { // also outside the segment
		shape := like.Shape()
		return tensor.New(tensor.F64, shape[:]...)
	}
	a := Args{Q: keys(), K: keys(), V: values(dimV), G: values(1), Beta: values(1), DO: values(dimV),
		State: state(dimV), DState: state(dimV), Maps: state(dim + dimV), DMaps: state(dim + dimV), O: values(dimV),
		Scale: 0.7, Segments: []Segment{{Lo: 1, Hi: 5}}, Entered: []int{0}, Followed: []int{0}}
	a.DQ, a.DK, a.DV, a.DG, a.DBeta = zeros(a.Q), zeros(a.K), zeros(a.V), zeros(a.G), zeros(a.Beta)
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
	for name, g := range map[string][2]View{"dq": {a.Q, a.DQ}, "dk": {a.K, a.DK}, "dv": {a.V, a.DV}, "dg": {a.G, a.DG},
		"dbeta": {a.Beta, a.DBeta}, "dstate": {a.State, before}} {
		attentiontest.Slopes(t, name, g[0], g[1], 1e-7, loss)
	}

	a.State, a.DState = zeros(a.State), zeros(a.DState)
	must(r.Forward(a), r.Backward(a))
	o, dq := near.Decode(a.O), near.Decode(a.DQ)
	none := a.State.Slice(tensor.Batch, 0, 0)
	a.State, a.DState, a.Entered, a.Followed = none, none, nil, nil
	must(r.Forward(a), r.Backward(a))
	if !slices.Equal(near.Decode(a.O), o) || !slices.Equal(near.Decode(a.DQ), dq) {
		t.Error("a segment without states differs from one with zeros")
	}
}
