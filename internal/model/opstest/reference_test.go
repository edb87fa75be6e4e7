package opstest

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestReferenceGradients compares each backward reference with central differences of the forward one: the derivative
// of the scalar dy.y by every element of every input.
func TestReferenceGradients(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	normal := func(n int) []float64 {
		xs := zeros(n)
		for i := range xs {
			xs[i] = rng.NormFloat64()
		}
		return xs
	}
	const rows, in, out = 3, 5, 4
	x, w, dy := normal(rows*in), normal(out*in), normal(rows*out)
	dx, dw := refLinearBackward(dy, x, w, rows, in, out)
	differences(t, "linear dx", x, dx, func() float64 { return dot(dy, refLinear(x, w, rows, in, out)) })
	differences(t, "linear dw", w, dw, func() float64 { return dot(dy, refLinear(x, w, rows, in, out)) })

	w, dy = normal(in), normal(rows*in)
	norm := func() float64 { y, _ := refNorm(x, w, 1e-3); return dot(dy, y) }
	dx, dw = refNormBackward(dy, x, w, 1e-3)
	differences(t, "rmsnorm dx", x, dx, norm)
	differences(t, "rmsnorm dw", w, dw, norm)

	cos, sin, x4, dy4 := normal(2*2), normal(2*2), normal(2*3*4), normal(2*3*4)
	differences(t, "rope", x4, refRope(dy4, cos, sin, 2, 3, 4, true),
		func() float64 { return dot(dy4, refRope(x4, cos, sin, 2, 3, 4, false)) })

	gate, up, dy := normal(9), normal(9), normal(9)
	for i := range gate { // beyond the clamps
		gate[i], up[i] = 5*gate[i], 5*up[i]
	}
	for _, act := range activations {
		dgate, dup := refGLUBackward(dy, gate, up, act)
		differences(t, "glu dgate", gate, dgate, func() float64 { return dot(dy, refGLU(gate, up, act)) })
		differences(t, "glu dup", up, dup, func() float64 { return dot(dy, refGLU(gate, up, act)) })
	}

	for _, g := range [][]float64{normal(9), normal(3)} {
		_, dx, dgate := refGate(dy, up, g)
		loss := func() float64 { y, _, _ := refGate(dy, up, g); return dot(dy, y) }
		differences(t, "gate dx", up, dx, loss)
		differences(t, "gate dgate", g, dgate, loss)
	}

	table, ids, dy := normal(4*3), []int32{3, 1, 3}, normal(3*3)
	differences(t, "embed", table, refEmbedBackward(dy, ids, 4, 3),
		func() float64 { return dot(dy, refEmbed(table, ids, 3)) })

	logits, targets := normal(4*7), []int32{6, -1, 0, 3}
	_, grad := refCrossEntropy(logits, targets, 7)
	differences(t, "cross entropy", logits, grad, func() float64 {
		loss, _ := refCrossEntropy(logits, targets, 7)
		return loss
	})
}

// TestExpertGradients does the same for routers and experts.
func TestExpertGradients(t *testing.T) {
	r := &rig{t: t, rng: rand.New(rand.NewPCG(5, 6)), dev: Device{Upload: func(v View) View { return v }}}
	normal := func(n int) []float64 { return refMap(zeros(n), func(float64) float64 { return r.rng.NormFloat64() }) }
	m := mix{5, 8, 3, false}
	for _, router := range routers(m) {
		logits, dw := normal(m.experts), normal(m.chosen)
		choice := refRoute(logits, zeros(m.experts), m.chosen, router)
		differences(t, "route", logits, refRouteBackward(dw, logits, choice, router),
			func() float64 { return dot(dw, refWeights(logits, choice, router)) })
	}
	logits, d := normal(m.experts), normal(m.experts)
	differences(t, "share", logits, refSoftmaxBackward(d, logits),
		func() float64 { return dot(d, refScores(logits, false)) })

	const in, out, n = 4, 3, 2
	deal := r.deal(m)
	w, dy := normal(m.experts*in*out), normal(deal.pairs()*out)
	for _, byToken := range []bool{false, true} {
		x := normal(deal.of(byToken) * in)
		y := func() float64 { return dot(dy, refGroupLinear(deal, x, w, in, out, byToken)) }
		differences(t, "group dw", w, refGroupLinearDW(deal, dy, x, in, out, false, byToken), y)
		if !byToken {
			differences(t, "group dx", x, refGroupLinearDX(deal, dy, w, in, out, false), y)
		}
	}
	x, da, weight := normal(deal.pairs()*2*n), normal(deal.pairs()*n), normal(deal.pairs())
	for _, act := range activations {
		loss := func() float64 { _, _, wy, _ := refGroupGLU(deal, x, da, weight, n, act); return dot(da, wy) }
		_, dx, wy, dweight := refGroupGLU(deal, x, da, weight, n, act)
		differences(t, "group glu dx", x, dx, loss)
		differences(t, "group glu da", da, wy, loss)
		differences(t, "group glu dweight", weight, dweight, loss)
	}
}

// TestRecurrentGradients does the same for the convolution and the gates.
func TestRecurrentGradients(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	normal := func(n int) []float64 { return refMap(zeros(n), func(float64) float64 { return rng.NormFloat64() }) }
	const n, heads, rows = 3, 2, 3
	for _, width := range []int{2, 4, 8} {
		r, w, dy := normal((rows+width-1)*n), normal(n*width), normal(rows*n)
		y := func() float64 { return dot(dy, refConv(r, w, n, width)) }
		dr, dw := refConvBackward(dy, r, w, n, width)
		differences(t, "conv dx", r, dr, y)
		differences(t, "conv dw", w, dw, y)
	}
	a, b, aLog, dt, dg, dbeta := normal(rows*heads), normal(rows*heads), normal(heads), normal(heads), normal(rows*heads),
		normal(rows*heads)
	loss := func() float64 { g, beta := refGates(a, b, aLog, dt); return dot(dg, g) + dot(dbeta, beta) }
	da, db, daLog, ddt := refGatesBackward(dg, dbeta, a, b, aLog, dt)
	differences(t, "gates da", a, da, loss)
	differences(t, "gates db", b, db, loss)
	differences(t, "gates daLog", aLog, daLog, loss)
	differences(t, "gates ddt", dt, ddt, loss)
}

// differences changes each element of x and compares the slope of f with grad.
func differences(t *testing.T, what string, x, grad []float64, f func() float64) {
	t.Helper()
	const h = 1e-5
	for i, was := range x {
		x[i] = was + h
		above := f()
		x[i] = was - h
		below := f()
		x[i] = was
		if want := (above - below) / (2 * h); !(math.Abs(grad[i]-want) <= 1e-8*(1+math.Abs(want))) {
			t.Errorf("%s: gradient %d is %.12g, the slope is %.12g", what, i, grad[i], want)
		}
	}
}

func dot(a, b []float64) float64 {
	sum := 0.0
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}
