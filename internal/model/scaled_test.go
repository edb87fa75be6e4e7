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
	for _, name := range []string{"llama tied", "gemma2", "olmo3", "granite", "qwen3_5", "qwen3_next", "qwen3_moe",
		"gpt_oss"} {
		cfg := *tinyModels[name]
		cfg.HiddenSize, cfg.IntermediateSize, cfg.HeadDim = 32, 48, 16
		if cfg.LinearKeyHeadDim > 0 {
			cfg.LinearKeyHeadDim, cfg.LinearValueHeadDim = 16, 8
		}
		if cfg.MoEIntermediateSize > 0 {
			cfg.MoEIntermediateSize = 16
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

// scaledCase returns the same model with products in E4M3.
func scaledCase(full *testCase) *testCase {
	cfg := *full.cfg
	cfg.Tuning.Linears = "fp8"
	c := *full
	c.cfg, c.params = &cfg, Params{Layout: NewLayout(&cfg, 1)}
	c.params.Weights = tensor.New(tensor.F32, int(c.params.Layout.Size()))
	c.params.Grads = tensor.New(tensor.F32, c.params.Weights.Size())
	c.freeze(tensor.New(tensor.F32, int(c.params.Layout.FrozenSize())))
	c.set(full.values())
	for ps := &c.params; ps != nil; ps = ps.Frozen {
		l := ps.Layout
		ps.Compute = Range{l.CodesSize(), l.Size()}.of(ps.Weights)
		ps.Codes = tensor.New(tensor.U8, int(l.CodesSize()))
		ps.Factors = tensor.New(tensor.F32, l.FactorsSize())
		for i, p := range l.Params {
			if w := ps.weight(i, p); w.scaled() {
				refOps{}.Quantize(w.codes, kernels.Scaled{}, p.View(ps.Weights), View{})
			}
		}
	}
	return &c
}

// gradients returns the gradients in the order of a layout.
func (c *testCase) gradients(of *FlatLayout) (list []float64) {
	byName := map[string][]float64{}
	for _, p := range c.params.Layout.Params {
		byName[p.Name] = get(p.View(c.params.Grads))
	}
	for _, p := range of.Params {
		list = append(list, byName[p.Name]...)
	}
	return list
}

// roundedRows returns x rounded by rows; byColumn: by columns.
func roundedRows(x View, byColumn bool) View {
	y, _ := roundedTo(x, byColumn)
	return y
}

// roundedTo also returns the factors.
func roundedTo(x View, byColumn bool) (y View, factors []float32) {
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
		factors = append(factors, factor)
		for k := range cols {
			*at(i, k) = float64(half.FromE4M3(half.ToE4M3(float32(*at(i, k))*(1/factor)))) * float64(factor)
		}
	}
	y = tensor.New(tensor.F64, shape(x)...)
	put(y, xs)
	return y, factors
}

func (r roundedOps) Linear(y, x, w, add View) {
	if slices.Contains(r.weights, w) {
		x, w = roundedRows(x, false), roundedRows(w, false)
	}
	r.Ops.Linear(y, x, w, add)
}

func (r roundedOps) LinearDX(dx, dy, w View, accumulate bool) {
	if slices.Contains(r.weights, w) {
		var factors []float32 // of rows of w, columns of dy
		w, factors = roundedTo(w, false)
		ws, dys := get(w), get(dy)
		for i := range ws {
			ws[i] /= float64(factors[i/w.Cols()])
		}
		for i := range dys {
			dys[i] = float64(float32(dys[i]) * factors[i%len(factors)])
		}
		put(w, ws)
		times := tensor.New(tensor.F64, shape(dy)...)
		put(times, dys)
		dy = roundedRows(times, false)
	}
	r.Ops.LinearDX(dx, dy, w, accumulate)
}

func (r roundedOps) LinearDW(dw, dy, x View, accumulate bool) {
	if slices.Contains(r.grads, dw) {
		dy, x = roundedRows(dy, true), roundedRows(x, true)
	}
	r.Ops.LinearDW(dw, dy, x, accumulate)
}

func (r roundedOps) GroupLinear(y View, x kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	if slices.Contains(r.weights, w) {
		x.View, w = roundedRows(x.View, false), roundedRows(w, false)
	}
	r.Ops.GroupLinear(y, x, w, p, accumulate)
}

// The factors of rows of w multiply columns of dy before these are rounded.
func (r roundedOps) GroupLinearDX(dx View, dy kernels.Operand, w View, p kernels.Pairs, accumulate bool) {
	if slices.Contains(r.weights, w) {
		n, dys, ws := dy.Cols(), get(dy.View), get(roundedRows(w, false))
		times, cols := make([]float64, p.Tokens.Size()*n), w.Cols()
		factor := func(row int) float32 {
			largest := 0.0
			for _, x := range get(w)[row*cols:][:cols] {
				largest = max(largest, math.Abs(x))
			}
			return max(float32(largest)/kernels.LargestE4M3, kernels.LeastFactor)
		}
		factors := make([]float32, w.Rows())
		for i := range factors {
			factors[i] = factor(i)
		}
		eachPlace(dy, p, func(i, e, from int) {
			for k := range n {
				times[i*n+k] = float64(float32(dys[from*n+k]) * factors[e*n+k])
			}
		})
		for i := range ws {
			ws[i] /= float64(factors[i/cols])
		}
		dy = kernels.Operand{View: roundedRows(tensor.FromSlice(times, 1, len(times)/n, 1, n), false)}
		w = tensor.FromSlice(ws, 1, w.Rows(), 1, cols)
	}
	r.Ops.GroupLinearDX(dx, dy, w, p, accumulate)
}

// A pass with Scaled equals one with rounded operands of products, also with adapters and frozen matrices, in tiles, and
// for each choice of kept activations.
func TestScaled(t *testing.T) {
	for name, cfg := range sixteens() {
		for what, c := range map[string]struct {
			tuning hf.Tuning
			short  Save
		}{
			"full": {hf.Tuning{}, SaveOutput}, "lora": {lora(0), SaveInput},
			"frozen": {hf.Tuning{Freeze: []string{"*.q_proj.weight", "*.up_proj.weight"}}, SaveAll},
		} {
			tuning := c.tuning
			for _, save := range []Save{SaveInput, SaveOutput, SaveAll} {
				if testing.Short() && save != c.short {
					continue
				}
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
					loss, _, _ := c.train(t, 1)
					c.ops = refOps{}
					scaled := scaledCase(c)
					got, _, peak := scaled.train(t, 1)
					c, grads, gots := scaled, c.gradients(c.params.Layout), scaled.gradients(c.params.Layout)
					if math.Abs(got-loss) > 1e-6*loss || got == plain {
						t.Errorf("loss %v, want %v, and not %v, which is unrounded", got, loss, plain)
					}
					if err := within.Within(gots, grads, within.Finite, 1e-5); err != nil {
						t.Errorf("gradients: %v", err)
					}
					b := c.batch.IDs
					c.opt.Segments, c.opt.States = len(c.att.Segments()), c.att.States()
					if plan := Plan(c.cfg, c.opt, b.Len(tensor.Batch), b.Len(tensor.Seq), tensor.F32); plan.Activations != peak {
						t.Errorf("planned %d bytes, took %d", plan.Activations, peak)
					}
				})
			}
		}
	}
}
