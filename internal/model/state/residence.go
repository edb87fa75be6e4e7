package state

import "github.com/cprun/cprun/internal/model"

// A Residence plans the gathers of weights. A slot is memory for the weights of the buckets that share it, one at a
// time. The plan follows the order of queued work, the same on every rank.
type Residence struct {
	Flat   *model.FlatLayout
	Slot   func(bucket int) int
	Holds  map[int]int // the bucket in each slot, if its weights are the newest
	Gather func(bucket int) error
}

// Use gathers a bucket, and those used with it, unless their slots hold them. It also gathers the next one, and the
// layer after that, if each has another slot than those before it.
func (r *Residence) Use(bucket, next int) error {
	err := r.need(bucket)
	if err != nil || next == model.NoBucket || r.Slot(next) == r.Slot(bucket) {
		return err
	}
	err = r.need(next)
	if b := r.after(bucket, next); err == nil && b != model.NoBucket && r.Slot(b) != r.Slot(bucket) &&
		r.Slot(b) != r.Slot(next) {
		err = r.need(b)
	}
	return err
}

// after returns the layer that follows two others; NoBucket: there is none. It assumes that the pass does not turn: a
// wrong guess costs a gather.
func (r *Residence) after(bucket, next int) int {
	b := 2*next - bucket
	for _, x := range []int{bucket, next, b} {
		if x < 0 || x >= len(r.Flat.Buckets) || r.Flat.Buckets[x].Part != model.LayerMatrices {
			return model.NoBucket
		}
	}
	return b
}

func (r *Residence) need(bucket int) error {
	for _, b := range r.Flat.With(bucket) {
		if have, ok := r.Holds[r.Slot(b)]; ok && have == b {
			continue
		}
		r.Holds[r.Slot(b)] = b
		if err := r.Gather(b); err != nil {
			return err
		}
	}
	return nil
}

// Forget marks the weights in all slots as old.
func (r *Residence) Forget() { clear(r.Holds) }

// Fill gathers a bucket alone if its slot holds none.
func (r *Residence) Fill(bucket int) error {
	if _, ok := r.Holds[r.Slot(bucket)]; ok {
		return nil
	}
	r.Holds[r.Slot(bucket)] = bucket
	return r.Gather(bucket)
}
