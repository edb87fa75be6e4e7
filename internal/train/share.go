package train

import (
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/optim"
	"github.com/cprun/cprun/internal/plan"
)

// sharing is what the ranks do with gradients and weights, bucket by bucket, while passes go
// on: gradients are reduced as soon as a backward pass is done with a bucket, and weights are
// gathered after a step in the order in which the next forward pass wants them. The transfers
// run on a communicator of their own, so that the ring's do not stand behind them.
type sharing struct {
	*state
	dev   *Device
	group comm.Communicator

	gathers []comm.Pending // of each bucket's weights; nil where they are there
	reduces []reduction    // of each bucket, or of each memory in staging
	first   bool           // the pass is the first of its step
	last    bool           // it is the last
}

// reduction is gradients on their way.
type reduction struct {
	comm.Pending      // nil: there are none
	bucket       int  // whose they are
	add          bool // to grads, when they have arrived
}

func newSharing(d *Device, s *state, group comm.Communicator) *sharing {
	x := &sharing{state: s, dev: d, group: group, gathers: make([]comm.Pending, len(s.flat.Buckets))}
	x.reduces = make([]reduction, len(s.flat.Buckets))
	if s.staging != nil {
		x.reduces = x.reduces[:plan.Stages]
	}
	return x
}

// hooks are called by the model's passes.
func (x *sharing) hooks() model.Hooks { return model.Hooks{Use: x.use, Begin: x.begin, Done: x.done} }

// use makes the compute stream wait for a bucket's weights.
func (x *sharing) use(bucket int) error {
	if p := x.gathers[bucket]; p != nil {
		p.Wait()
		x.gathers[bucket] = nil
	}
	return nil
}

// begin makes room for a bucket's gradients.
func (x *sharing) begin(bucket int) error {
	if x.staging == nil || x.staging[bucket].Size() == 0 {
		return nil
	}
	if err := x.land(plan.StageOf(x.flat, bucket)); err != nil {
		return err
	}
	return x.dev.Ops.Zero(x.staging[bucket])
}

// done begins the reduction of a bucket's gradients: after every pass where they are staged,
// else after the last.
func (x *sharing) done(bucket int) error {
	if x.size == 1 || x.flat.Buckets[bucket].Size() == 0 || x.staging == nil && !x.last {
		return nil
	}
	at, r := bucket, reduction{bucket: bucket}
	var err error
	switch {
	case x.shard == shardNone:
		r.Pending, err = x.group.AllReduce(x.whole(x.grads, bucket), comm.Sum)
	case x.staging == nil:
		r.Pending, err = x.group.ReduceScatter(x.own(x.grads, bucket), x.whole(x.grads, bucket), comm.Sum)
	default:
		at, r.add = plan.StageOf(x.flat, bucket), !x.first
		dst := x.own(x.grads, bucket)
		if r.add {
			dst = x.staged(bucket)
		}
		r.Pending, err = x.group.ReduceScatter(dst, x.staging[bucket], comm.Sum)
	}
	if err != nil {
		return fmt.Errorf("gradient reduction: %w", err)
	}
	x.reduces[at] = r
	return nil
}

// staged is this rank's part of a bucket's staged gradients.
func (x *sharing) staged(bucket int) View {
	n := x.staging[bucket].Size() / x.size
	return part(x.staging[bucket], x.rank*n, (x.rank+1)*n)
}

// land makes the compute stream wait for a reduction, and adds up what it brought.
func (x *sharing) land(at int) error {
	r := x.reduces[at]
	x.reduces[at] = reduction{}
	if r.Pending == nil {
		return nil
	}
	r.Wait()
	if r.add {
		return x.dev.Ops.Add(x.own(x.grads, r.bucket), x.staged(r.bucket))
	}
	return nil
}

// start prepares the gradients for the passes of a step.
func (x *sharing) start() error {
	if x.staging != nil { // the first pass's are written over what was there
		return nil
	}
	return x.dev.Ops.Zero(x.grads)
}

// order is the buckets in the order in which a forward pass uses them.
func (x *sharing) order() []int {
	buckets := []int{model.Embedding, x.flat.Vectors()}
	for b := model.Layer(0); b <= x.flat.Head(); b++ {
		buckets = append(buckets, b)
	}
	return buckets
}

// step ends a step: it waits for the gradients, adds their squares to norm2, adds sums, of
// which norm2 is a part, up over the ranks, clips, updates, and begins to gather the weights.
// norm2 then holds the square of the gradient's norm before clipping, with its scale.
func (x *sharing) step(sums, norm2 View, u optim.Update) error {
	x.dev.Stream.Label("optimizer")
	defer x.dev.Stream.Label("")
	for at := range x.reduces {
		if err := x.land(at); err != nil {
			return err
		}
	}
	x.sumSquares(x.dev.Optim, norm2)
	if err := x.sum(sums); err != nil {
		return fmt.Errorf("loss and gradient norm: %w", err)
	}
	for _, b := range x.order() {
		if x.flat.Buckets[b].Size() == 0 {
			continue
		}
		x.update(x.dev.Optim, b, norm2, u)
		if err := x.gather(b); err != nil {
			return err
		}
	}
	return nil
}

// sum adds v up over the ranks.
func (x *sharing) sum(v View) error {
	if x.size == 1 {
		return nil
	}
	return ordered(x.group.AllReduce(v, comm.Sum))
}

// publish makes weights that were loaded known to the model, here and on the other ranks.
func (x *sharing) publish() error {
	for _, b := range x.order() {
		if x.flat.Buckets[b].Size() == 0 {
			continue
		}
		x.copyCompute(x.dev.Ops, b)
		if err := x.gather(b); err != nil {
			return err
		}
	}
	return nil
}

// gather begins to bring the ranks' parts of a bucket's weights together.
func (x *sharing) gather(bucket int) error {
	dst, src := x.gathered(bucket)
	if dst.IsZero() {
		return nil
	}
	p, err := x.group.AllGather(dst, src)
	if err != nil {
		return fmt.Errorf("gathering weights: %w", err)
	}
	x.gathers[bucket] = p
	return nil
}

// settle makes the compute stream wait for all weights.
func (x *sharing) settle() {
	for b := range x.gathers {
		_ = x.use(b) // it never fails
	}
}

// ordered queues what follows on the compute stream behind a transfer.
func ordered(p comm.Pending, err error) error {
	if err == nil {
		p.Wait()
	}
	return err
}
