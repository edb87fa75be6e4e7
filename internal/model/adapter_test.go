package model

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// tunedCase returns a model of tinyModels of which only some parameters are trained, with random adapters. Its batch
// numbers the tokens, for dropout.
func tunedCase(name string, dtype tensor.DType, tuning hf.Tuning) *testCase {
	cfg := *tinyModels[name]
	cfg.Tuning = tuning
	c := tinyCaseOf(&cfg, dtype)
	numbers := make([]int32, c.batch.IDs.Size())
	for i := range numbers {
		numbers[i] = int32(100 + 7*i)
	}
	shape := c.batch.IDs.Shape()
	c.batch.Tokens, c.batch.Key = tensor.FromSlice(numbers, shape[0], shape[1], 1, 1), 5
	return c
}

func lora(dropout float64, targets ...string) hf.Tuning {
	return hf.Tuning{LoRA: &hf.LoRA{R: 3, Alpha: 5, Dropout: dropout, RSLoRA: len(targets) > 0, Targets: hf.Modules{Names: targets}}}
}

// The gradients of adapters, with dropout, and of parameters beside frozen ones are the slope of the loss, in float64.
func TestTunedGradientsAreTheSlopeOfTheLoss(t *testing.T) {
	some := lora(0, "o_proj", "layers.1.mlp.up_proj")
	some.LoRA.TargetParameters = []string{"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
	for what, tuning := range map[string]hf.Tuning{
		"adapters": lora(0.3), "some": some,
		"frozen": {Freeze: []string{"*.q_proj.weight", "*norm.weight", "model.embed_tokens.*", "model.layers.1.*"}},
	} {
		samples := 5 // of each parameter, at least
		if testing.Short() {
			samples = 1
		}
		for name := range tinyModels {
			t.Run(what+" "+name, func(t *testing.T) {
				t.Parallel()
				const scale, h = 0.25, 1e-5
				c := tunedCase(name, tensor.F64, tuning)
				c.opt.tile = 4
				_, grads, _ := c.train(t, scale)
				loss := func() (sum float64) {
					if tuning.LoRA != nil && tuning.LoRA.Dropout > 0 {
						sum, _, _ = c.train(t, scale)
					} else { // a pass forward has the same loss
						sum, _ = c.validate(t)
					}
					return sum
				}
				for _, p := range Layout(c.cfg) {
					w := tensor.Data[float64](p.View(c.params.Weights))
					for i := len(w) / (2 * samples); i < len(w); i += 1 + len(w)/samples {
						at := w[i]
						w[i] = at + h
						up := loss()
						w[i] = at - h
						down := loss()
						w[i] = at
						want := scale * (up - down) / (2 * h)
						near(t, fmt.Sprintf("gradient of %s[%d]", p.Name, i), grads[int(p.Offset)+i], want,
							1e-6*(1+math.Abs(want)))
					}
				}
			})
		}
	}
}

// A model with adapters computes the losses of the model with W + scale * B A.
func TestAdaptersAreAddedToTheMatrix(t *testing.T) {
	for name := range tinyModels {
		for _, tuning := range []hf.Tuning{lora(0.3), lora(0, "k_proj", "down_proj")} {
			c := tunedCase(name, tensor.F64, tuning)
			got, _ := c.validate(t)
			values, l := c.values(), tuning.LoRA
			for _, tensor := range c.cfg.Tensors() {
				matrix, row, _ := tensor.Matrix() // in files, which may join several
				prefix := "base_model.model." + strings.TrimSuffix(matrix, "weight")
				as, bs := values[prefix+"lora_A.weight"], values[prefix+"lora_B.weight"]
				if as == nil {
					continue
				}
				w, in := values[tensor.Name], tensor.Shape[1]
				r := len(as) / in
				for i := range w {
					for k := range r {
						w[i] += l.Scale(matrix) * bs[(row+i/in)*r+k] * as[k*in+i%in]
					}
				}
			}
			plain := tinyCase(name, tensor.F64)
			plain.set(values)
			want, _ := plain.validate(t)
			near(t, fmt.Sprintf("%s, %+v", name, l), got, want, 1e-12*want)
		}
	}
}

// Dropout drops the same elements in recomputed layers and for any tiles, other ones for another key, and none without
// tokens.
func TestDropoutDependsOnTokensAlone(t *testing.T) {
	run := func(set func(c *testCase)) (float64, []float64) {
		c := tunedCase("llama tied", tensor.F64, lora(0.4))
		set(c)
		loss, grads, _ := c.train(t, 1)
		return loss, grads
	}
	loss, grads := run(func(*testCase) {})
	for what, c := range map[string]struct {
		set  func(c *testCase)
		same bool
	}{
		"recompute":       {func(c *testCase) { c.opt.Recompute = RecomputeFull }, true},
		"small tiles":     {func(c *testCase) { c.opt.tile = 3; c.opt.Recompute = RecomputeSelective }, true},
		"another key":     {func(c *testCase) { c.batch.Key++ }, false},
		"without numbers": {func(c *testCase) { c.batch.Tokens = View{} }, false},
	} {
		l, g := run(c.set)
		off := math.Abs(l-loss) + norm(minus(g, grads))
		if (off < 1e-10) != c.same {
			t.Errorf("%s: loss and gradients differ by %g", what, off)
		}
	}
}

func minus(a, b []float64) []float64 {
	out := slices.Clone(a)
	for i := range out {
		out[i] -= b[i]
	}
	return out
}

// Frozen parameters leave the layout, and every bucket has its number in both.
func TestLayoutOfFrozenParameters(t *testing.T) {
	cfg := *tinyModels["qwen3 sliding"]
	all := NewLayout(&cfg, 3)
	for what, tuning := range map[string]hf.Tuning{
		"adapters": lora(0), "one layer": {Freeze: []string{"model.layers.1.*"}},
		"all but one": {Freeze: []string{"model.*"}},
	} {
		cfg.Tuning = tuning
		l := NewLayout(&cfg, 3)
		if len(l.Buckets) != len(all.Buckets) || len(l.Frozen.Buckets) != len(all.Buckets) {
			t.Errorf("%s: %d and %d buckets, want %d", what, len(l.Buckets), len(l.Frozen.Buckets), len(all.Buckets))
		}
		names := map[string]bool{}
		for _, flat := range []*FlatLayout{l, l.Frozen} {
			for i, p := range flat.Params {
				names[p.Name] = true
				if b := flat.Buckets[flat.Of(i)]; p.Offset < b.Lo || p.Offset+int64(p.Size()) > b.Hi {
					t.Errorf("%s: %s at %d lies outside its bucket %v", what, p.Name, p.Offset, b)
				}
				if want := flat.index[keyOf(&cfg, p.Tensor)]; flat.Of(i) != want {
					t.Errorf("%s: %s is in bucket %d, want %d", what, p.Name, flat.Of(i), want)
				}
				if cfg.Frozen(p.Tensor) != (flat == l.Frozen) {
					t.Errorf("%s: %s is in the wrong layout", what, p.Name)
				}
			}
		}
		if len(names) != len(all.Params)+len(cfg.Adapters()) {
			t.Errorf("%s: %d names for %d parameters", what, len(names), len(all.Params))
		}
	}
}
