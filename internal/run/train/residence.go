package train

import (
	"cmp"
	"fmt"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// checkUses rehearses two steps of a model, each with a forward pass after it. It returns an error if a pass would read
// a bucket before its gather, or after another bucket has replaced it.
func checkUses(slot func(bucket int) int, flat *model.FlatLayout, cfg *hf.Config, opt model.Options) (err error) {
	in := map[int]int{} // bucket by slot, as gathers leave it
	r := state.Residence{Flat: flat, Slot: slot, Holds: map[int]int{}, Gather: func(b int) error {
		in[slot(b)] = b
		return nil
	}}
	opt.Hooks = model.Hooks{Use: func(bucket, next int) error {
		if next == model.NoBucket {
			next = flat.Embedding() // as between the micro batches of a step
		}
		err = cmp.Or(err, r.Use(bucket, next))
		for _, b := range append(flat.With(bucket), flat.Vectors()) {
			if have, ok := in[slot(b)]; err == nil && (!ok || have != b) {
				err = fmt.Errorf("weights of bucket %d would be read without a gather, or after bucket %d has replaced "+
					"them", b, have)
			}
		}
		return nil
	}}
	for range 2 {
		r.Forget()
		clear(in)
		for _, b := range updates(flat) {
			err = cmp.Or(err, r.Fill(b))
		}
		model.Plan(cfg, opt, 1, 1, tensor.F32)
	}
	return err
}
