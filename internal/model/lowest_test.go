package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// frozenCase returns a model with weights of another by name. Some are frozen.
func frozenCase(full *testCase, freeze []string) *testCase {
	cfg := *full.cfg
	cfg.Tuning = hf.Tuning{Freeze: freeze}
	c := *full
	c.cfg, c.params = &cfg, Params{Layout: NewLayout(&cfg, 1)}
	c.params.Weights = tensor.New(tensor.F32, int(c.params.Layout.Size()))
	c.params.Compute, c.params.Grads = c.params.Weights, tensor.New(tensor.F32, c.params.Weights.Size())
	c.freeze(tensor.New(tensor.F32, int(c.params.Layout.FrozenSize())))
	c.set(full.values())
	return &c
}

// flopCounter counts the products with matrices, and passes of attention.
type flopCounter struct {
	nopOps
	Still
	flops             float64
	forward, backward int
}

func (c *flopCounter) add(y, x View) {
	c.flops += 2 * float64(x.Rows()) * float64(y.Cols()) * float64(x.Cols())
}

func (c *flopCounter) Linear(y, x, _, _ View)          { c.add(y, x) }
func (c *flopCounter) LinearDX(dx, dy, _ View, _ bool) { c.add(dx, dy) }
func (c *flopCounter) LinearDW(_, dy, x View, _ bool)  { c.add(dy, x) }

func (c *flopCounter) GroupLinear(y View, x kernels.Operand, _ View, _ kernels.Pairs, _ bool) {
	c.flops += 2 * float64(y.Size()) * float64(x.Cols())
}

func (c *flopCounter) GroupLinearDX(dx View, dy kernels.Operand, _ View, _ kernels.Pairs, _ bool) {
	c.flops += 2 * float64(dx.Size()) * float64(dy.Cols())
}

func (c *flopCounter) GroupLinearDW(_ View, dy, x kernels.Operand, p kernels.Pairs, _ bool) {
	c.flops += 2 * float64(p.Tokens.Rows()) * float64(dy.Cols()) * float64(x.Cols())
}

func (c *flopCounter) Recur(_ int, _ delta.Args, beside func()) error {
	c.forward++
	beside()
	return nil
}

func (c *flopCounter) RecurBackward(_ int, _ delta.Args, beside func()) error {
	c.backward++
	beside()
	return nil
}

func (c *flopCounter) Forward(int, attention.Partial, View, View, View) error {
	c.forward++
	return nil
}

func (c *flopCounter) Backward(int, attention.Grads, View, View, View, View, attention.Partial) error {
	c.backward++
	return nil
}

// A backward pass that ends in the lowest layer with a trained parameter gives the bits of a full one. Its products are
// the ones in FLOPs, and its memory is as planned, whatever the layers keep.
func TestBackwardEndsInTheLowestTrainedLayer(t *testing.T) {
	const layers = 5
	embedding := "model.embed_tokens.*"
	cases := []struct {
		freeze []string
		lowest int
	}{
		{[]string{"*.down_proj.*"}, -1},
		{[]string{embedding}, 0},
		{[]string{embedding, "*norm.weight"}, 0},
		{[]string{embedding, "model.layers.[012].*"}, 3},
		{[]string{embedding, "model.layers.[012].*", "*.q_proj.*", "*norm.weight"}, 3},
		{[]string{embedding, "model.layers.[0123].*", "model.layers.4.[im]*", "*.k_proj.*"}, 4},
		{[]string{embedding, "model.layers.*"}, layers},
	}
	choices := 4 // of what layers keep
	if testing.Short() {
		choices = 2
	}
	for name := range tinyModels {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(5, 6))
			full := tinyCaseOf(deep(name, layers), tensor.F32)
			wantLoss, want, most := full.train(t, 0.5)
			for _, tc := range cases {
				c := frozenCase(full, tc.freeze)
				for n := range choices {
					if c.opt = (Options{}); n > 0 {
						c.opt.Layers = randomRetain(r, layers)
					}
					m := &mover{run: func(f func()) { f() }}
					c.opt.Hooks = m.hooks()
					given := slices.Clone(c.opt.Layers)
					loss, grads, peak := c.train(t, 0.5)
					if loss != wantLoss || !slices.Equal(c.opt.Layers, given) {
						t.Errorf("%v: loss %v, want %v", tc.freeze, loss, wantLoss)
					}
					for _, p := range c.params.Layout.Params {
						for _, q := range Layout(full.cfg) {
							if lo, hi := int(p.Offset), int(q.Offset); q.Name == p.Name &&
								!slices.Equal(grads[lo:lo+p.Size()], want[hi:hi+p.Size()]) {
								t.Errorf("%v, layers keep %v: the gradient of %s differs", tc.freeze, c.opt.Layers, p.Name)
							}
						}
					}
					c.opt.Hooks = Hooks{}
					b := c.batch.IDs
					c.opt.Segments = len(c.att.segments)
					plan := Plan(c.cfg, c.opt, b.Len(tensor.Batch), b.Len(tensor.Seq), tensor.F32)
					if plan.Activations != peak || plan.Host != m.bytes || tc.lowest > 0 && n == 0 && peak >= most {
						t.Errorf("%v, layers keep %v: planned %d bytes and %d on the host, took %d and %d; all gradients %d",
							tc.freeze, c.opt.Layers, plan.Activations, plan.Host, peak, m.bytes, most)
					}
				}
				got, tokens := &flopCounter{Still: Still{segments: 1}}, 6
				if err := Rehearse(c.cfg, Options{}, 1, tokens, tensor.F32, got, got); err != nil {
					t.Fatal(err)
				}
				flops := WorkOf(c.cfg).FLOPs([]int{tokens})
				for i, l := range c.cfg.Layers() {
					products := 12
					if i < tc.lowest {
						products = 4
					}
					d := l.Mixer.Delta
					flops -= float64(products*l.Mixer.Heads*l.Mixer.Dim)*VisiblePairs([]int{tokens}, l.Mixer.Window) +
						float64(products/4*6*d.Heads*d.Dim*d.DimV*tokens)
				}
				near(t, fmt.Sprint("FLOPs of products, ", tc.freeze), flops, got.flops, 0)
				if got.forward != layers || got.backward != layers-max(tc.lowest, 0) {
					t.Errorf("%v: %d passes of attention forward, %d backward", tc.freeze, got.forward, got.backward)
				}
			}
		})
	}
}
