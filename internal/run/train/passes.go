package train

import (
	"cmp"
	"context"

	"github.com/cprun/cprun/internal/base/splitmix"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/state"
)

// passes queues the forward and backward passes of a step. It returns the load of the sequences.
func (t *Trainer) passes(ctx context.Context, f *inflight) (total load, err error) {
	loss, before, lossScale := state.Part(t.sums, sumLoss, sumLoss+1), t.sent.sent, cmp.Or(f.scale, 1)
	list, counts := t.groups(), t.routes.of(t.sums)
	err = t.balance(&counts, f.r.Tokens, lossScale, len(list), func(r model.Routes) error {
		seen := t.train.seen
		defer func() { t.train.seen = seen }()
		t.train.seen = nil // it sees each batch once, below
		for _, g := range list {
			set := func(b *microBatch) { b.Routes = r }
			if _, err := t.forward(ctx, t.train, g, View{}, set); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return total, err
	}
	for i, g := range list {
		b, err := t.train.batch(ctx, g.samples, g.trained)
		if err != nil {
			return total, err
		}
		t.share.first, t.share.last = i == 0, i == len(list)-1
		if err := t.att.begin(b); err != nil {
			return total, err
		}
		b.Key, b.Routes = splitmix.Step(uint64(t.cfg.Train.Seed))+uint64(t.step), counts
		if err := t.model.ForwardBackward(t.arena, b.Batch, loss, lossScale/float64(f.valid)); err != nil {
			return total, err
		}
		b.done()
		load, err := t.att.load()
		if err != nil {
			return total, err
		}
		total.add(load, len(g.samples))
	}
	total.sent = t.sent.sent - before
	return total, nil
}

// A group is the samples of a pass. Those from trained on train nothing.
type group struct {
	samples []int64
	trained int
}

func all(samples []int64) group { return group{samples, len(samples)} }

// groups lists the passes of a step.
func (t *Trainer) groups() (list []group) {
	of := t.cfg.Train.MicroBatchSize * t.mesh.dataSize
	for m := range (t.batch() + of - 1) / of {
		samples, trained := t.samplesOf(m)
		for _, g := range t.train.groups(samples) {
			list = append(list, group{g, max(0, trained)})
			trained -= len(g)
		}
	}
	return list
}
