package train

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// routes count the tokens of the experts in a step, after the other sums, and balance them.
type routes struct {
	layers, mixed int // of the model, and those of them with experts
	experts       int // of a layer; 0: none has any
	coef          float64
	total         View // the loads of all ranks, if coef is above 0
}

func newRoutes(cfg *hf.Config) (r routes) {
	for _, l := range cfg.Layers() {
		if n := l.MLP.Experts.Count; n > 0 {
			r.mixed++
			r.experts = n
		}
	}
	r.layers, r.coef = cfg.NumHiddenLayers, cfg.BalanceCoef()
	return r
}

// sums returns the number of sums: the loads of each layer, and the shares.
func (r *routes) sums() int { return (r.layers + 1) * r.experts }

// of returns the views of the sums for a model.
func (r *routes) of(sums View) (out model.Routes) {
	if r.experts == 0 {
		return out
	}
	share := sumCount + r.layers*r.experts
	out.Load = state.Part(sums, sumCount, share).Reshape([4]int{1, r.layers, 1, r.experts})
	out.Share = state.Part(sums, share, share+r.experts)
	return out
}

// balance makes the passes of a step add the gradient of scale times the loss of balance. The loads of all its tokens
// must be known before, so with several passes the forward passes of all run first.
func (t *Trainer) balance(out *model.Routes, tokens int, scale float64, passes int,
	count func(model.Routes) error) error {
	r := &t.routes
	if r.coef == 0 {
		return nil
	}
	n := float64(r.mixed) * float64(tokens)
	out.Total, out.Factor = r.total, scale*r.coef*float64(r.experts)/(n*n)
	sum := func() error { return t.share.sum(r.total) }
	if passes == 1 {
		own := out.Load
		out.Counted = func() error {
			t.dev.Ops.Copy(r.total, own)
			return sum()
		}
		return nil
	}
	t.dev.Ops.Zero(r.total)
	if err := count(model.Routes{Load: r.total}); err != nil {
		return err
	}
	return sum()
}

// results returns the loss of balance, if there is one, and the largest load of an expert over the mean of its layer,
// given the sums of a step over all ranks; nil without experts.
func (r *routes) results(sums []float64, tokens int) (loss, imbalance *metrics.Float) {
	if r.experts == 0 {
		return nil, nil
	}
	shares, n, product, worst := sums[r.layers*r.experts:], float64(r.mixed)*float64(tokens), 0.0, 0.0
	loads := make([]float64, r.experts)
	for layer := range slices.Chunk(sums[:r.layers*r.experts], r.experts) {
		all := 0.0
		for e, load := range layer {
			all += load
			loads[e] += load
		}
		if all > 0 {
			worst = max(worst, slices.Max(layer)*float64(r.experts)/all)
		}
	}
	for e, share := range shares {
		product += loads[e] / n * share / n
	}
	if r.coef > 0 {
		loss = new(metrics.Float(float64(r.experts) * product))
	}
	return loss, new(metrics.Float(worst))
}

// open allocates the loads of all ranks.
func (r *routes) open(dev *Device) (err error) {
	if r.coef == 0 {
		return nil
	}
	v, err := dev.Vector("loads of experts", tensor.F64, r.layers*r.experts)
	if err != nil {
		return fmt.Errorf("loads of experts: %w", err)
	}
	r.total = v.Reshape([4]int{1, r.layers, 1, r.experts})
	return nil
}
