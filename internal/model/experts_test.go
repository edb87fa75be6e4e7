package model

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// balanced adds counts, and the loss of balance for given loads, to a case. Two tokens only fill the batch.
func balanced(c *testCase) {
	n, e := c.cfg.NumHiddenLayers, c.cfg.NumExperts
	total := make([]float64, n*e)
	for i := range total {
		total[i] = float64(1 + i*i%7)
	}
	c.batch.Routes = Routes{Load: tensor.New(tensor.F64, 1, n, 1, e), Share: tensor.New(tensor.F64, 1, 1, 1, e),
		Total: tensor.FromSlice(total, 1, n, 1, e), Factor: 0.07}
	shape, numbers := c.batch.IDs.Shape(), make([]int32, c.batch.IDs.Size())
	numbers[2], numbers[9] = -1, -1
	c.batch.Tokens = tensor.FromSlice(numbers, shape[0], shape[1], 1, 1)
}

// The gradient with balance is the slope of the loss plus the factor times shares and given loads, in float64.
func TestBalanceIsTheSlope(t *testing.T) {
	for _, name := range []string{"qwen3_moe", "mixtral"} {
		c := tinyCase(name, tensor.F64)
		balanced(c)
		r := &c.batch.Routes
		objective := func() float64 {
			put(r.Share, make([]float64, r.Share.Size()))
			loss, _ := c.validate(t)
			sum := 0.25 * loss
			for e, share := range get(r.Share) {
				for i, load := range get(r.Total) {
					if i%c.cfg.NumExperts == e {
						sum += r.Factor * share * load
					}
				}
			}
			return sum
		}
		_, grads, _ := c.train(t, 0.25)
		for _, p := range Layout(c.cfg) {
			w := tensor.Data[float64](p.View(c.params.Weights))
			for i := 0; i < len(w); i += 1 + len(w)/5 {
				const h = 1e-5
				at := w[i]
				w[i] = at + h
				up := objective()
				w[i] = at - h
				down := objective()
				w[i] = at
				want := (up - down) / (2 * h)
				near(t, fmt.Sprintf("%s, %s[%d]", name, p.Name, i), grads[int(p.Offset)+i], want, 1e-7*(1+math.Abs(want)))
			}
		}
	}
}

// A pass counts each choice of a counted token once, whatever it recomputes. Counted is called between the passes.
func TestRoutesAreCountedOnce(t *testing.T) {
	for _, mode := range []Recompute{RecomputeNone, RecomputeSelective, RecomputeFull} {
		c := tinyCase("qwen3_moe", tensor.F64)
		balanced(c)
		c.opt.Recompute, c.opt.tile = mode, 4
		r, between := &c.batch.Routes, 0.0
		r.Counted = func() error {
			for _, load := range get(r.Load) {
				between += load
			}
			return nil
		}
		c.train(t, 1)
		tokens := float64(c.batch.IDs.Size() - 2)
		loads, shares, n := get(r.Load), 0.0, c.cfg.NumExperts
		for i, load := range loads {
			if i >= n && load != 0 {
				t.Errorf("%s: the layer without experts has loads %v", mode, loads[n:])
			}
		}
		for _, share := range get(r.Share) {
			shares += share
		}
		near(t, "choices", between, tokens*float64(c.cfg.NumExpertsPerTok), 0)
		near(t, "shares", shares, tokens, 1e-12)
	}
}

// A layer with a backward pass keeps its routes, since other kernels could choose otherwise when they compute it again.
func TestRoutesAreKept(t *testing.T) {
	c := tinyCase("mixtral", tensor.F64)
	c.opt.Layers = []Retain{{Save: SaveInput}, {Save: SaveNothing}}
	_, want, _ := c.train(t, 1)
	moving := &routeCounter{}
	c.ops = moving
	_, got, _ := c.train(t, 1)
	if moving.routes != c.cfg.NumHiddenLayers || !slices.Equal(got, want) {
		t.Errorf("%d routes of %d layers; gradients equal: %t", moving.routes, c.cfg.NumHiddenLayers,
			slices.Equal(got, want))
	}
}

// routeCounter counts routes.
type routeCounter struct {
	refOps
	routes int
}

func (m *routeCounter) Route(weight, choice, logits, correction View, r kernels.Router) {
	m.routes++
	m.refOps.Route(weight, choice, logits, correction, r)
}
