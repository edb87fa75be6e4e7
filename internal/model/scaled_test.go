package model

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/half"
	within "github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// sixteens lists tiny models with widths for E4M3.
func sixteens() map[string]*hf.Config {
	list := map[string]*hf.Config{}
	for _, name := range []string{"llama tied", "gemma2", "olmo3", "granite", "qwen3_5", "qwen3_next", "qwen3_moe"} {
		cfg := *tinyModels[name]
		cfg.HiddenSize, cfg.IntermediateSize, cfg.HeadDim = 32, 48, 16
		if cfg.LinearKeyHeadDim > 0 {
			cfg.LinearKeyHeadDim, cfg.LinearValueHeadDim = 16, 8
		}
		if cfg.SharedExpertIntermediateSize > 0 {
			cfg.SharedExpertIntermediateSize = 16
		}
		list[name] = &cfg
	}
	return list
}

// roundedOps round the operands of products with some matrices to E4M3, with a factor for each row along the sum, and
// multiply these values.
type roundedOps struct {
	Ops
	weights, grads []View
}

// roundedRows returns x rounded by rows; byColumn: by columns.
func roundedRows(x View, byColumn bool) View {
	rows, cols, xs := x.Rows(), x.Cols(), get(x)
	at := func(i, k int) *float64 { return &xs[i*x.Cols()+k] }
	if byColumn {
		rows, cols = cols, rows
		at = func(i, k int) *float64 { return &xs[k*x.Cols()+i] }
	}
	for i := range rows {
		largest := float32(0)
		for k := range cols {
			largest = max(largest, float32(math.Abs(*at(i, k))))
		}
		factor := max(largest/kernels.LargestE4M3, kernels.LeastFactor)
		for k := range cols {
			*at(i, k) = float64(half.FromE4M3(half.ToE4M3(float32(*at(i, k))*(1/factor)))) * float64(factor)
		}
	}
	y := tensor.New(tensor.F64, shape(x)...)
	put(y, xs)
	return y
}

func (r roundedOps) Linear(y, x, w, add View) {
	if slices.Contains(r.weights, w) {
		x, w = roundedRows(x, false), roundedRows(w, false)
	}
	r.Ops.Linear(y, x, w, add)
}

func (r roundedOps) LinearDX(dx, dy, w View, accumulate bool) {
	if slices.Contains(r.weights, w) {
		dy, w = roundedRows(dy, false), roundedRows(w, true)
	}
	r.Ops.LinearDX(dx, dy, w, accumulate)
}

func (r roundedOps) LinearDW(dw, dy, x View, accumulate bool) {
	if slices.Contains(r.grads, dw) {
		dy, x = roundedRows(dy, true), roundedRows(x, true)
	}
	r.Ops.LinearDW(dw, dy, x, accumulate)
}

// A pass with Scaled equals one with rounded operands of products, also with adapters and frozen matrices, in tiles, and
// for each choice of kept activations.
func TestScaled(t *testing.T) {
	for name, cfg := range sixteens() {
		for what, tuning := range map[string]hf.Tuning{
			"full": {}, "lora": lora(0), "frozen": {Freeze: []string{"*.q_proj.weight", "*.up_proj.weight"}},
		} {
			for _, save := range []Save{SaveInput, SaveOutput, SaveAll} {
				t.Run(fmt.Sprintf("%s/%s/%v", name, what, save), func(t *testing.T) {
					own := *cfg
					own.Tuning = tuning
					c := tinyCaseOf(&own, tensor.F32)
					c.opt = Options{Layers: slices.Repeat([]Retain{{Save: save}}, own.NumHiddenLayers), tile: 5}
					plain, _, _ := c.train(t, 1)
					rounded := roundedOps{Ops: refOps{}}
					for ps := &c.params; ps != nil; ps = ps.Frozen {
						for _, p := range ps.Layout.Params {
							if _, _, adapts := hf.Adapted(p.Name); p.Scaled() && !adapts {
								rounded.weights = append(rounded.weights, p.View(ps.Compute))
								if ps == &c.params {
									rounded.grads = append(rounded.grads, p.View(ps.Grads))
								}
							}
						}
					}
					c.ops = rounded
					loss, grads, _ := c.train(t, 1)
					c.ops, c.opt.Scaled = refOps{}, true
					got, gots, peak := c.train(t, 1)
					if math.Abs(got-loss) > 1e-6*loss || got == plain {
						t.Errorf("loss %v, want %v, and not %v, which is unrounded", got, loss, plain)
					}
					if err := within.Within(gots, grads, within.Finite, 1e-5); err != nil {
						t.Errorf("gradients: %v", err)
					}
					b := c.batch.IDs
					c.opt.Segments, c.opt.States = len(c.att.Segments()), c.att.States()
					if plan := Plan(&own, c.opt, b.Len(tensor.Batch), b.Len(tensor.Seq), tensor.F32); plan.Activations != peak {
						t.Errorf("planned %d bytes, took %d", plan.Activations, peak)
					}
				})
			}
		}
	}
}
