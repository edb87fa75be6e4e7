package model

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// The gradient of every parameter equals the slope of the loss, in float64.
func TestGradientsAreTheSlopeOfTheLoss(t *testing.T) {
	for name := range tinyModels {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const scale, h = 0.25, 1e-6
			c := tinyCase(name, tensor.F64)
			c.opt.LossChunk, c.arenaSize = 5, 1<<14
			_, grads, _ := c.train(t, scale)
			for _, p := range Layout(c.cfg) {
				w := tensor.Data[float64](p.View(c.params.Weights))
				zero := true
				for i := range w {
					if testing.Short() && (i+i/7)%15 != 1 && len(w) > 15 {
						continue // other columns in each row, for any length of row
					}
					at := w[i]
					w[i] = at + h
					up, _ := c.validate(t)
					w[i] = at - h
					down, _ := c.validate(t)
					w[i] = at
					got, want := grads[int(p.Offset)+i], scale*(up-down)/(2*h)
					near(t, fmt.Sprintf("gradient of %s[%d]", p.Name, i), got, want, 1e-7*(1+math.Abs(want)))
					zero = zero && got == 0
				}
				if zero {
					t.Errorf("all gradients of %s are 0", p.Name)
				}
			}
		})
	}
}

// attentions returns the number of layers with attention.
func attentions(cfg *hf.Config) (n int) {
	for _, l := range cfg.Layers() {
		if !l.Mixer.Recurs() {
			n++
		}
	}
	return n
}

func TestRecomputeModesAgreeBitForBit(t *testing.T) {
	for name := range tinyModels {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			t.Run(fmt.Sprint(name, " ", dtype), func(t *testing.T) {
				var wantLoss float64
				var want []float64
				var peaks []int64
				for _, mode := range []Recompute{RecomputeNone, RecomputeSelective, RecomputeFull} {
					c := tinyCase(name, tensor.F32)
					if dtype != tensor.F32 {
						c.compute(dtype)
					}
					c.opt.Recompute, c.att.calls = mode, new([2]int)
					loss, grads, peak := c.train(t, 0.5)
					if want == nil {
						wantLoss, want = loss, grads
					}
					if !(loss == wantLoss) || !slices.Equal(grads, want) {
						t.Errorf("%s: loss %v, want %v; gradients equal: %t", mode, loss, wantLoss,
							slices.Equal(grads, want))
					}
					calls := [2]int{attentions(c.cfg), attentions(c.cfg)}
					if mode == RecomputeFull {
						calls[0] *= 2
					}
					if *c.att.calls != calls {
						t.Errorf("%s: attention called %v times forward and backward, want %v", mode, *c.att.calls,
							calls)
					}
					peaks = append(peaks, peak)
				}
				// With two such small layers, recomputation saves less than the alignment of the arena, so the test
				// only checks the order.
				if !(peaks[2] <= peaks[1] && peaks[1] <= peaks[0]) {
					t.Errorf("peaks of none, selective, full: %d", peaks)
				}
			})
		}
	}
}

// bfloat16 activations give nearly the results of float64. This checks the conversions between float32 and the type of
// activations.
func TestBFloat16ActivationsComeClose(t *testing.T) {
	for name := range tinyModels {
		t.Run(name, func(t *testing.T) {
			exact, rounded := tinyCase(name, tensor.F64), tinyCase(name, tensor.F32)
			rounded.compute(tensor.BF16)
			wantLoss, want, _ := exact.train(t, 1)
			loss, grads, _ := rounded.train(t, 1)
			near(t, "loss", loss, wantLoss, 0.02*wantLoss)
			for i := range want {
				grads[i] -= want[i]
			}
			if e := norm(grads) / norm(want); !(e < 0.1) {
				t.Errorf("gradients are off by %.3f of their norm", e)
			}
		})
	}
}

func TestLossChunksAgree(t *testing.T) {
	for name := range tinyModels {
		t.Run(name, func(t *testing.T) {
			c := tinyCase(name, tensor.F64)
			c.opt.LossChunk = 1000
			wantLoss, want, _ := c.train(t, 1)
			for _, chunk := range []int{0, 1, 2, 3, 7, 13, 14, 15} {
				c.opt.LossChunk = chunk
				loss, grads, _ := c.train(t, 1)
				near(t, fmt.Sprintf("loss in chunks of %d", chunk), loss, wantLoss, 1e-12*wantLoss)
				validation, _ := c.validate(t)
				near(t, fmt.Sprintf("validation in chunks of %d", chunk), validation, wantLoss, 1e-12*wantLoss)
				for i := range want {
					grads[i] -= want[i]
				}
				near(t, fmt.Sprintf("gradients in chunks of %d", chunk), norm(grads), 0, 1e-12*norm(want))
			}
		})
	}
}

// Tiles of tokens change only the order of the sums of weight gradients.
func TestTilesAgree(t *testing.T) {
	for name := range tinyModels {
		t.Run(name, func(t *testing.T) {
			c := tinyCase(name, tensor.F64)
			wantLoss, want, _ := c.train(t, 0.5)
			for _, tile := range []int{1, 3, 5, 7, 13, 14, 15} {
				c.opt.tile = tile
				var first []float64
				for _, mode := range []Recompute{RecomputeNone, RecomputeSelective, RecomputeFull} {
					c.opt.Recompute = mode
					loss, grads, _ := c.train(t, 0.5)
					validation, _ := c.validate(t)
					if loss != wantLoss || validation != wantLoss {
						t.Errorf("%s in tiles of %d: loss %v and %v, want %v", mode, tile, loss, validation, wantLoss)
					}
					if first == nil {
						first = slices.Clone(grads)
					}
					if !slices.Equal(grads, first) || tile >= 14 && !slices.Equal(grads, want) {
						t.Errorf("%s in tiles of %d: other bits of gradients", mode, tile)
					}
					for i := range want {
						grads[i] -= want[i]
					}
					near(t, fmt.Sprintf("gradients in tiles of %d", tile), norm(grads), 0, 1e-12*norm(want))
				}
			}
		})
	}
}

// Losses and gradients accumulate over micro batches.
func TestPassesAccumulate(t *testing.T) {
	c := tinyCase("llama tied", tensor.F64)
	once, want, _ := c.train(t, 1)
	sum, a := tensor.New(tensor.F64, 1), c.arena()
	for range 2 {
		if err := c.model().ForwardBackward(a, c.batch, sum, 1); err != nil {
			t.Fatal(err)
		}
	}
	near(t, "loss", get(sum)[0], 3*once-once, 1e-12)
	for i, g := range get(c.params.Grads) {
		near(t, "gradient", g, 3*want[i], 1e-12)
	}
}

// A fresh pass overwrites any gradients, gaps included, and later ones add: with the bits of sums that began as 0. Without
// tokens they become 0.
func TestFreshPassesOverwrite(t *testing.T) {
	freeze := hf.Tuning{Freeze: []string{"*.q_proj.weight", "*.gate_up_proj.weight", "*norm.weight", "model.layers.1.*"}}
	for name := range tinyModels {
		for what, c := range map[string]*testCase{"all": tinyCase(name, tensor.F32),
			"adapters": tunedCase(name, tensor.F32, lora(0.3)), "frozen": tunedCase(name, tensor.F32, freeze)} {
			for _, tokens := range []int{7, 0} {
				c.opt.LossChunk, c.opt.tile = 5, 4
				b := &c.batch
				c.att.segments = documents(nil, tokens)
				for _, v := range []*View{&b.IDs, &b.Targets, &b.Cos, &b.Sin} {
					*v = v.Slice(tensor.Seq, 0, tokens)
				}
				b.Tokens = View{}
				twice := func(fresh bool) []float64 {
					c.opt.Hooks.Begin = func(int) bool { return fresh }
					if fill(c.params.Grads, 0); fresh {
						fill(c.params.Grads, 0xff) // NaN
					}
					m := c.model()
					for range 2 {
						if err := m.ForwardBackward(c.arena(), *b, tensor.New(tensor.F64, 1), 0.5); err != nil {
							t.Fatal(err)
						}
						fresh = false
					}
					return get(c.params.Grads)
				}
				want := twice(false)
				if got := twice(true); !slices.Equal(got, want) || tokens > 0 == (norm(want) == 0) {
					t.Errorf("%s, %s, %d tokens: %v, want %v", name, what, tokens, got, want)
				}
			}
		}
	}
}

// A rank without tokens still calls attention, since other ranks wait in it. Nothing else changes.
func TestNoTokens(t *testing.T) {
	for name := range tinyModels {
		for _, mode := range []Recompute{RecomputeNone, RecomputeSelective, RecomputeFull} {
			c := tinyCase(name, tensor.F32)
			c = newCase(c.cfg, c.params.Weights, 1, nil, nil, nil)
			c.opt.Recompute, c.att.calls = mode, new([2]int)
			loss, grads, _ := c.train(t, 1)
			validation, _ := c.validate(t)
			if loss != 0 || validation != 0 || norm(grads) != 0 {
				t.Errorf("%s %s: loss %v, validation %v, gradient %v", name, mode, loss, validation, norm(grads))
			}
			if n := attentions(c.cfg); c.att.calls[0] < n || c.att.calls[1] != n {
				t.Errorf("%s %s: attention called %v times", name, mode, *c.att.calls)
			}
		}
	}
}

// Targets below 0 contribute neither to the loss nor to a gradient.
func TestNoTargets(t *testing.T) {
	c := tinyCase("qwen3 sliding", tensor.F32)
	targets := ints(c.batch.Targets)
	for i := range targets {
		targets[i] = -1
	}
	if loss, grads, _ := c.train(t, 1); loss != 0 || norm(grads) != 0 {
		t.Errorf("loss %v, gradient %v", loss, norm(grads))
	}
}

// broken fails in one layer, forward or backward.
type broken struct {
	refAttention
	forward, backward int
}

var errLink = errors.New("link down")

func (b broken) Forward(layer int, acc attention.Partial, q, k, v View) error {
	if layer == b.forward {
		return errLink
	}
	return b.refAttention.Forward(layer, acc, q, k, v)
}

func (b broken) Backward(layer int, g attention.Grads, do, q, k, v View, acc attention.Partial) error {
	if layer == b.backward {
		return errLink
	}
	return b.refAttention.Backward(layer, g, do, q, k, v, acc)
}

func TestErrorsOfAttentionNameTheLayer(t *testing.T) {
	for want, b := range map[string]broken{
		"layer 1 forward: link down":  {forward: 1, backward: -1},
		"layer 0 backward: link down": {forward: -1, backward: 0},
	} {
		c := tinyCase("qwen3 sliding", tensor.F32)
		b.refAttention = c.att
		m, a, loss := New(c.cfg, c.ops, b, c.params, c.opt), c.arena(), tensor.New(tensor.F64, 1)
		before := a.Mark()
		if err := m.ForwardBackward(a, c.batch, loss, 1); err == nil || err.Error() != want ||
			!errors.Is(err, errLink) {
			t.Errorf("error %v, want %q", err, want)
		}
		if b.forward >= 0 {
			if err := m.Forward(a, c.batch, loss); err == nil || err.Error() != want {
				t.Errorf("error %v, want %q", err, want)
			}
		}
		if a.Mark() != before {
			t.Error("an error left memory in the arena")
		}
	}
}
