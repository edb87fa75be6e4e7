package train

import (
	"cmp"
	"fmt"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// A residence plans the gathers of weights. A slot is memory for the weights of the buckets that share it, one at a
// time. The plan follows the order of queued work, the same on every rank.
type residence struct {
	slot   func(bucket int) int
	holds  map[int]int // the bucket in each slot, if its weights are the newest
	gather func(bucket int) error
}

// use gathers a bucket unless its slot holds it. If the next bucket has another slot, use gathers that also.
func (r *residence) use(bucket, next int) error {
	err := r.need(bucket)
	if err != nil || next == model.NoBucket || r.slot(next) == r.slot(bucket) {
		return err
	}
	return r.need(next)
}

func (r *residence) need(bucket int) error {
	if have, ok := r.holds[r.slot(bucket)]; ok && have == bucket {
		return nil
	}
	r.holds[r.slot(bucket)] = bucket
	return r.gather(bucket)
}

// forget marks the weights in all slots as old.
func (r *residence) forget() { clear(r.holds) }

// fill gathers a bucket if its slot holds none.
func (r *residence) fill(bucket int) error {
	if _, ok := r.holds[r.slot(bucket)]; ok {
		return nil
	}
	return r.need(bucket)
}

// checkUses rehearses two steps of a model, each with a forward pass after it. It returns an error if a pass would read
// a bucket before its gather, or after another bucket has replaced it.
func checkUses(slot func(bucket int) int, flat *model.FlatLayout, cfg *hf.Config, opt model.Options) (err error) {
	in := map[int]int{} // bucket by slot, as gathers leave it
	r := residence{slot: slot, holds: map[int]int{}, gather: func(b int) error {
		in[slot(b)] = b
		return nil
	}}
	opt.Hooks = model.Hooks{Use: func(bucket, next int) error {
		if next == model.NoBucket {
			next = flat.Embedding() // as between the micro batches of a step
		}
		err = cmp.Or(err, r.use(bucket, next))
		for _, b := range []int{bucket, flat.Vectors()} {
			if have, ok := in[slot(b)]; err == nil && (!ok || have != b) {
				err = fmt.Errorf("weights of bucket %d would be read without a gather, or after bucket %d has replaced "+
					"them", b, have)
			}
		}
		return nil
	}}
	for range 2 {
		r.forget()
		clear(in)
		for _, b := range order(flat) {
			err = cmp.Or(err, r.fill(b))
		}
		model.Plan(cfg, opt, 1, 1, tensor.F32)
	}
	return err
}
