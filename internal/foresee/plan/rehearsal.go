package plan

import (
	"errors"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// A rehearsal is both passes of a model over devices that only record. It has the seconds and sizes of the layers.
type rehearsal struct {
	model.Still
	batch, tokens int
	share         float64                 // tokens of the run for each rehearsed token
	mapped        float64                 // share of the tokens in segments with a successor
	attention     []layerTimes            // by layer
	seconds       func(cost.Work) float64 // of any other operation on the rehearsed tokens
	record        cost.Recorder           // spends the seconds of each

	flat       *model.FlatLayout
	layers     []layer
	uses       []use
	first, all int64   // trained parameters that the forward pass reads before any layer; and of the model
	begin, end float64 // seconds before the layers; and after them, of the head, the loss and the embedding's gradients
	at         *float64
	turned     bool     // the forward pass is over
	mixing     passTime // of attention in all layers
}

// A layer has the seconds of its passes, the backward pass with its recomputation, and its sizes.
type layer struct {
	forward, backward float64
	kept              int64 // bytes of saved activations
	trained           int64 // parameters of matrices
}

// A use is the work of a pass on the weights of a bucket.
type use struct {
	bucket  int
	seconds float64
	done    []int // buckets with complete gradients then
}

// run rehearses a run of cfg with the layers of m.
func (r *rehearsal) run(cfg *config.Config, m *Memory, d *demand) error {
	for _, bytes := range d.activations(cfg, m).Kept {
		r.layers = append(r.layers, layer{kept: bytes})
	}
	flat := d.flat(cfg, 1)
	for _, b := range flat.Buckets {
		if b.Layer < 0 {
			continue
		}
		r.layers[b.Layer].trained += b.Size()
	}
	r.flat, r.first, r.all, r.at = flat, flat.Buckets[flat.Embedding()].Size(), flat.Size(), &r.begin
	opt := m.options(cfg)
	opt.Hooks.Use, opt.Hooks.Done = r.use, r.done
	r.record = func(w cost.Work) { r.spend(r.seconds(w)) }
	err := model.Rehearse(&cfg.Model.Config, opt, r.batch, r.tokens, backend.DType(cfg), r.record, r)
	r.begin, r.end = r.share*r.begin, r.share*r.end
	for i := range r.layers {
		l := &r.layers[i]
		l.forward, l.backward = r.share*l.forward, r.share*l.backward
	}
	for i := range r.uses {
		r.uses[i].seconds *= r.share
	}
	return err
}

// spend adds the seconds of an operation.
func (r *rehearsal) spend(t float64) {
	*r.at += t
	r.uses[len(r.uses)-1].seconds += t
}

// use begins the operations on the weights of a bucket.
func (r *rehearsal) use(bucket, _ int) error {
	r.uses = append(r.uses, use{bucket: bucket})
	i := r.flat.Buckets[bucket].Layer
	switch {
	case i >= 0 && r.turned:
		r.at = &r.layers[i].backward
	case i >= 0:
		r.at = &r.layers[i].forward
	case r.at != &r.begin: // the head, above the layers
		r.turned, r.at = true, &r.end
	}
	return nil
}

// done ends the operations on the gradients of a bucket.
func (r *rehearsal) done(bucket int) error {
	last := &r.uses[len(r.uses)-1]
	r.at, last.done = &r.end, append(last.done, bucket)
	return nil
}

// sums returns the seconds of both passes of all layers.
func (r *rehearsal) sums() (forward, backward float64) {
	for i := range r.layers {
		forward, backward = forward+r.layers[i].forward, backward+r.layers[i].backward
	}
	return forward, backward
}

type layerTimes struct{ forward, backward passTime }

// A passTime holds the seconds of one pass of attention on the slowest rank: of its kernels, and of the
// transfers that they do not hide.
type passTime struct {
	compute, exposed float64
	calls            int
}

// mix adds a pass of attention. Its times are for all tokens.
func (r *rehearsal) mix(p passTime) error {
	r.spend(p.compute / r.share)
	x := &r.mixing
	x.compute, x.exposed, x.calls = x.compute+p.compute, x.exposed+p.exposed, x.calls+p.calls
	return nil
}

// Recur adds the products of a recurrent layer.
func (r *rehearsal) Recur(_ int, a delta.Args, beside func()) error {
	beside()
	return r.rule(a, r.record.Summarize, r.record.Forward)
}

// RecurBackward adds those of the gradients.
func (r *rehearsal) RecurBackward(_ int, a delta.Args, beside func()) error {
	beside()
	return r.rule(a, r.record.SummarizeBackward, r.record.Backward)
}

// rule adds the calls over the segments with a successor, which needs their maps, and over all.
func (r *rehearsal) rule(a delta.Args, some, all func(delta.Args) error) error {
	n := a.Q.Len(tensor.Seq)
	a.Segments = []delta.Segment{{Hi: int(r.mapped * float64(n))}}
	err := some(a)
	a.Segments[0].Hi = n
	return errors.Join(err, all(a))
}

// Forward implements model.Attention.
func (r *rehearsal) Forward(layer int, _ attention.Partial, _, _, _ tensor.View) error {
	return r.mix(r.attention[layer].forward)
}

// Backward implements model.Attention.
func (r *rehearsal) Backward(layer int, _ attention.Grads, _, _, _, _ tensor.View, _ attention.Partial) error {
	return r.mix(r.attention[layer].backward)
}

// weights returns the bytes of a bucket's weights for passes, trained and frozen.
func weights(flat *model.FlatLayout, bucket int, dtype tensor.DType) int64 {
	n := read(flat, bucket, dtype)
	if flat.Frozen != nil {
		n += read(flat.Frozen, bucket, dtype)
	}
	return n
}

// read returns the bytes of a bucket of one layout for passes: in a type, or codes.
func read(flat *model.FlatLayout, bucket int, dtype tensor.DType) int64 {
	n := flat.Buckets[bucket].Size()
	if flat.Scaled(bucket) {
		return n
	}
	return n * int64(dtype.Size())
}

// waits returns the seconds for which a step of micro passes waits for a link that gathers sharded weights, into slots
// for layers, and reduces gradients in between. gather and reduce return the seconds of a bucket's transfers.
func (r *rehearsal) waits(micro, slots int, gather, reduce func(bucket int) float64) float64 {
	var now, link, work, reductions, one, all float64
	idle := func() { // until now, the link reduces
		if now > link {
			reductions, link = max(0, reductions-(now-link)), now
		}
	}
	arrives := map[int]float64{} // by slot
	slot := func(b int) int { return state.StageOf(r.flat, b, slots) }
	resident := state.Residence{Flat: r.flat, Slot: slot, Holds: map[int]int{}, Gather: func(b int) error {
		idle()
		link += gather(b)
		arrives[slot(b)] = link
		return nil
	}}
	for range min(micro, 2) { // the others are as the second
		for i, u := range r.uses {
			next := r.flat.Embedding()
			if i+1 < len(r.uses) {
				next = r.uses[i+1].bucket
			}
			resident.Use(u.bucket, next)
			for _, b := range r.flat.With(u.bucket) {
				now = max(now, arrives[slot(b)])
			}
			now += u.seconds
			work += u.seconds
			idle()
			for _, b := range u.done {
				reductions += reduce(b)
			}
		}
		one, all = all, max(now, link+reductions)-work
	}
	return all + float64(max(micro-2, 0))*(all-one)
}

// offloading returns the seconds that copies to and from the host, at a rate, add to a step of micro passes.
func (m *Memory) offloading(rate float64, r *rehearsal, micro int) (t float64) {
	input := make([]float64, len(r.layers)) // seconds to move the activations of each layer
	moved := m.Layers.Host - model.HostSlots
	for i, retain := range m.retain() {
		if l := &r.layers[i]; retain.Host && moved > 0 {
			moved--
			input[i] = float64(l.kept) / rate
			t += float64(micro) * (exposedCopy(input[i], l.forward) + exposedCopy(input[i], l.backward))
		}
	}
	if m.HostOptimizer == 0 {
		return t
	}
	// Updates run beside one forward pass, which waits for the first, on the link of the activations.
	update := float64(m.HostOptimizer) / rate / float64(r.all) // of a parameter
	t += update * float64(r.first)
	for i := range r.layers {
		l := &r.layers[i]
		t += exposedCopy(input[i]+update*float64(l.trained), l.forward) - exposedCopy(input[i], l.forward)
	}
	return t
}

// contention is the share of a hidden copy's time that it costs the work beside it.
const contention = 0.02

// exposedCopy returns the time that a copy adds to the work beside it.
func exposedCopy(copy, work float64) float64 { return max(copy-work, contention*copy) }
