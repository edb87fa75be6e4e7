package model

import (
	"math"
	"strings"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// recorder keeps the logits of a pass.
type recorder struct {
	refOps
	logits *[]float64
}

func (r recorder) CrossEntropy(loss, logits, targets View, scale, softcap float64, grad bool) {
	*r.logits = append(*r.logits, get(logits)...)
	r.refOps.CrossEntropy(loss, logits, targets, scale, softcap, grad)
}

// The first training step equals PyTorch's: loss, logits, and the gradient norm of each tensor. PyTorch computed in
// float32, which sets the tolerances.
func TestParityWithTransformers(t *testing.T) {
	for _, name := range fixtures {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := loadFixture(t, name)
			n := f.expect.Seq
			ids, targets := make([]int32, n), make([]int32, n)
			for i := range n {
				ids[i], targets[i] = int32(f.tokens[i]), int32(f.tokens[i+1])
			}
			var logits []float64
			flat := NewLayout(f.cfg, 1)
			c := newCase(f.cfg, f.weights(t, flat, tensor.F32), 1, ids, targets, nil)
			if flat.Frozen != nil {
				c.freeze(f.weights(t, flat.Frozen, tensor.F32))
			}
			c.ops = recorder{logits: &logits}
			c.opt = Options{Recompute: RecomputeSelective, LossChunk: 100}
			loss, grads, _ := c.train(t, 1/float64(n))

			near(t, "loss", loss/float64(n), f.expect.Loss[0], 2e-6)
			first, last := logits[:f.cfg.VocabSize], logits[(n-1)*f.cfg.VocabSize:]
			for i := range f.expect.First.LogitsRow0 {
				near(t, "first logits", first[i], f.expect.First.LogitsRow0[i], 1e-5)
				near(t, "last logits", last[i], f.expect.First.LogitsLast[i], 1e-5)
			}
			squares := map[string]float64{} // by the tensor in files
			for _, p := range Layout(f.cfg) {
				name, _, _ := p.Matrix()
				if p.Experts > 0 {
					name = p.Name
				}
				squares[name] += math.Pow(norm(get(p.View(c.params.Grads))), 2)
			}
			if got, want := len(squares), len(f.expect.First.GradNorms); got != want {
				t.Errorf("%d parameters, transformers has %d", got, want)
			}
			// Of linear layers, transformers itself is 2e-5 from its result in float64, relative.
			within := 1e-5
			if strings.HasSuffix(name, "-linear") {
				within = 4e-5
			}
			near(t, "gradient", norm(grads), f.expect.GradNorm[0], 2*within)
			clip := 1.0
			if limit := f.expect.GradClip; limit > 0 {
				clip = min(1, limit/(norm(grads)+1e-6))
			}
			for name, square := range squares {
				want, ok := f.expect.First.GradNorms[name]
				if !ok {
					t.Errorf("transformers has no parameter %s", name)
				}
				near(t, "gradient of "+name, clip*math.Sqrt(square), want, max(want, 0.01)*within)
			}
		})
	}
}

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance) {
		t.Errorf("%s: %.9g, want %.9g within %.2g", what, got, want, tolerance)
	}
}

func norm(xs []float64) float64 {
	s := 0.0
	for _, x := range xs {
		s += x * x
	}
	return math.Sqrt(s)
}
