package opstest

import (
	"math"

	"github.com/cprun/cprun/tensor"
)

func testCrossEntropy(r *rig) {
	type shape struct{ batch, seq, vocab int }
	shapes := []shape{{1, 1, 1}, {1, 0, 5}, {1, 1, 17}, {2, 3, 33}, {1, 70, 1031}}
	each(r, shapes, func(r *rig, s shape) {
		targets := make([]int32, s.batch*s.seq)
		for i := range targets {
			targets[i] = int32(r.rng.IntN(s.vocab))
			if i%5 == 3 {
				targets[i] = -100
			}
		}
		at := r.ints(targets, s.batch, s.seq, 1, 1)
		logits, values := r.random(r.act, s.batch, s.seq, 1, s.vocab)
		want, grad := refCrossEntropy(values, targets, s.vocab)
		const before, scale = 2.5, 0.125
		loss, _ := r.put(tensor.F64, []float64{before}, 1, 1, 1, 1)
		r.ops.CrossEntropy(loss, logits, at, scale, false)
		r.close("loss", loss, []float64{before + want})
		r.equal("logits without grad", logits, values)
		r.ops.CrossEntropy(loss, logits, at, scale, true)
		r.close("loss added twice", loss, []float64{before + 2*want})
		for i := range grad {
			grad[i] *= scale
		}
		r.close("grad", logits, grad)
	})
}

// testCrossEntropyIgnored puts NaN and infinities into rows without a target: they must not
// reach the loss, and their gradient is 0, not 0 times NaN.
func testCrossEntropyIgnored(r *rig) {
	nan, inf := math.NaN(), math.Inf(1)
	logits, _ := r.put(r.act, []float64{nan, nan, nan, 0, 0, 0, inf, -inf, nan}, 1, 3, 1, 3)
	loss, _ := r.put(tensor.F64, []float64{0}, 1, 1, 1, 1)
	at := r.ints([]int32{-1, 2, -100}, 1, 3, 1, 1)
	r.ops.CrossEntropy(loss, logits, at, 3, false)
	r.close("loss", loss, []float64{math.Log(3)})
	r.ops.CrossEntropy(loss, logits, at, 3, true)
	r.close("loss with grad", loss, []float64{2 * math.Log(3)})
	r.close("grad", logits, []float64{0, 0, 0, 1, 1, -2, 0, 0, 0})
	got := r.read(logits)
	for _, i := range []int{0, 1, 2, 6, 7, 8} {
		if got[i] != 0 {
			r.t.Errorf("gradient %d of a row without target is %g, want 0", i, got[i])
		}
	}
	// No row has a target: the loss stays as it is, to the bit.
	loss, _ = r.put(tensor.F64, []float64{0.1}, 1, 1, 1, 1)
	r.ops.CrossEntropy(loss, logits, r.ints([]int32{-1, -1, -1}, 1, 3, 1, 1), 3, true)
	r.equal("loss without targets", loss, []float64{0.1})
}

// testCrossEntropyExtreme has logits whose exponential overflows or vanishes, and NaN in a
// row that counts, which must show.
func testCrossEntropyExtreme(r *rig) {
	values := []float64{10000, 9984, 9984, -10000, 64, -10000, 0, 0, -30}
	targets := []int32{1, 1, 2}
	at := r.ints(targets, 1, 3, 1, 1)
	logits, values := r.put(r.act, values, 1, 3, 1, 3)
	loss, _ := r.put(tensor.F64, []float64{0}, 1, 1, 1, 1)
	want, grad := refCrossEntropy(values, targets, 3)
	r.ops.CrossEntropy(loss, logits, at, 1, true)
	r.close("loss", loss, []float64{want})
	r.close("grad", logits, grad)

	logits, _ = r.put(r.act, []float64{0, math.NaN()}, 1, 1, 1, 2)
	r.ops.CrossEntropy(loss, logits, r.ints([]int32{0}, 1, 1, 1, 1), 1, false)
	if got := r.read(loss)[0]; !math.IsNaN(got) {
		r.t.Errorf("loss of a NaN logit is %g", got)
	}
}
