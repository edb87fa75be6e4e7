package plan

import (
	"cmp"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/tensor"
)

// charged implements the attention of the model: it adds up the times of the passes of a layer.
type charged struct {
	layers           []layerTimes // of each layer
	compute, exposed float64
	calls            int
}

// layerTimes has the times of the attention of a layer.
type layerTimes struct{ forward, backward passTime }

// passTime has the seconds of one pass of attention on the slowest rank: of its kernels, and of the transfers
// that they do not hide.
type passTime struct {
	compute, exposed float64
	calls            int
}

func (c *charged) add(p passTime) error {
	c.compute, c.exposed, c.calls = c.compute+p.compute, c.exposed+p.exposed, c.calls+p.calls
	return nil
}

// Forward implements model.Attention.
func (c *charged) Forward(layer int, _ attention.Partial, _, _, _ tensor.View) error {
	return c.add(c.layers[layer].forward)
}

// Backward implements model.Attention.
func (c *charged) Backward(layer int, _ attention.Grads, _, _, _, _ tensor.View, _ attention.Partial) error {
	return c.add(c.layers[layer].backward)
}

// attention finds the times of the passes of every layer.
func (s *step) attention() (*charged, error) {
	cfg := s.cfg
	q := questionOf(cfg)
	of := caseOf(&q, planner.Place{PerHost: s.perHost, Shared: s.shared, Cores: s.cores})
	of.Backend = s.kernel
	byWindow := map[int]layerTimes{}
	for _, w := range windowsOf(cfg) {
		shape, err := shapeOf(cfg, s.docs, w.window)
		if err != nil {
			return nil, err
		}
		spec := specOf(cfg, shape)
		forward, backward, err := planner.Passes(cfg.Parallel.Algorithm, spec, of.Attention, of.At, s.costs)
		if err != nil {
			return nil, err
		}
		byWindow[w.window] = layerTimes{longest(forward), longest(backward)}
	}
	c := &charged{}
	for l := range cfg.Model.NumHiddenLayers {
		c.layers = append(c.layers, byWindow[cfg.Model.Window(l)])
	}
	return c, nil
}

// longest returns a pass on the rank that ends last. What the host takes is counted for the whole step, in which it is
// ahead of the device.
func longest(r planner.Result) passTime {
	last := slices.MaxFunc(r.Ranks, func(a, b planner.Rank) int { return cmp.Compare(busy(&a), busy(&b)) })
	return passTime{last.Compute + last.Copies, last.Exposed, last.Calls}
}

// busy returns the time of a rank for a pass without its host.
func busy(r *planner.Rank) float64 { return r.Compute + r.Copies + r.Exposed }
