package train

import (
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// sharing moves gradients and weights between ranks, bucket by bucket, while passes run. It reduces the gradients of a
// bucket as soon as a backward pass is done with it. After a step it gathers the weights in the order of the next
// forward pass. The transfers have their own communicators, so that the ring does not wait for them.
type sharing struct {
	*state.State
	dev    *Device
	world  comm.Communicator   // all ranks, for sums over all gradients
	groups []comm.Communicator // by bucket: the ranks that share its gradients and weights

	label labels // of queued work

	gathers []comm.Pending // gathers of weights by bucket; nil if complete
	reduces []reduction    // by bucket, or by staging buffer
	first   bool           // first pass of the step
	last    bool           // last pass of the step

	wire wire
}

type reduction struct {
	comm.Pending // nil: none
	bucket       int
	add          bool // add the result to the gradients
}

func newSharing(d *Device, s *state.State) *sharing {
	x := &sharing{State: s, dev: d, label: labels{flat: s.Flat,
		streams: append([]tensor.Stream{d.Stream}, d.Copies...)},
		gathers: make([]comm.Pending, len(s.Flat.Buckets))}
	x.reduces = make([]reduction, len(s.Flat.Buckets))
	if s.Staging != nil {
		x.reduces = x.reduces[:state.Stages]
	}
	x.wire = wire{ops: d.Ops, send: s.Wire}
	return x
}

// join sets the groups that share the buckets. Call it before the first pass.
func (x *sharing) join(world comm.Communicator, groups []comm.Communicator) error {
	for b, g := range groups {
		if have := (state.Group{Rank: g.Rank(), Size: g.Size()}); have != x.Group(b) {
			return fmt.Errorf("bucket %d: group %+v, but the layout is for %+v", b, have, x.Group(b))
		}
	}
	x.world, x.groups = world, groups
	return nil
}

func (x *sharing) hooks() model.Hooks { return model.Hooks{Use: x.use, Begin: x.begin, Done: x.done} }

func (x *sharing) use(bucket int) error {
	x.label.part("forward", bucket)
	x.arrive(bucket)
	return nil
}

func (x *sharing) arrive(bucket int) {
	if p := x.gathers[bucket]; p != nil {
		p.Wait()
		x.gathers[bucket] = nil
	}
}

func (x *sharing) begin(bucket int) error {
	x.label.part("backward", bucket)
	if x.Staging == nil || x.Staging[bucket].Size() == 0 {
		return nil
	}
	x.waitAndAccumulate(state.StageOf(x.Flat, bucket))
	x.dev.Ops.Zero(x.Staging[bucket])
	return nil
}

// done begins the reduction of a bucket's gradients, after every pass if they are staged, else after the last pass.
func (x *sharing) done(bucket int) (err error) {
	if x.Flat.Buckets[bucket].Size() == 0 || x.Staging == nil && !x.last {
		return nil
	}
	at, r, group := bucket, reduction{bucket: bucket}, x.groups[bucket]
	switch {
	case group.Size() == 1:
		x.keep(bucket)
		return nil
	case x.Staging != nil:
		at, r.add = state.StageOf(x.Flat, bucket), !x.first
		dst := x.Own(x.Grads, bucket)
		if r.add {
			dst = x.Staged(bucket)
		}
		r.Pending, err = x.wire.reduceScatter(group, dst, x.Staging[bucket])
	case x.Sharded():
		r.Pending, err = x.wire.reduceScatter(group, x.Own(x.Grads, bucket), x.Whole(x.Grads, bucket))
	default:
		r.Pending, err = group.AllReduce(x.Whole(x.Grads, bucket), comm.Sum)
	}
	if err != nil {
		return fmt.Errorf("gradient reduction: %w", err)
	}
	x.reduces[at] = r
	return nil
}

// keep accumulates the gradients of a bucket that this rank does not share.
func (x *sharing) keep(bucket int) {
	switch {
	case x.Staging == nil: // in place
	case x.first:
		x.dev.Ops.Copy(x.Own(x.Grads, bucket), x.Staging[bucket])
	default:
		x.dev.Ops.Add(x.Own(x.Grads, bucket), x.Staging[bucket])
	}
}

// waitAndAccumulate makes the compute stream wait for a reduction, and accumulates its result.
func (x *sharing) waitAndAccumulate(at int) {
	r := x.reduces[at]
	x.reduces[at] = reduction{}
	if r.Pending == nil {
		return
	}
	r.Wait()
	if r.add {
		x.dev.Ops.Add(x.Own(x.Grads, r.bucket), x.Staged(r.bucket))
	}
}

// start prepares the gradients for the passes of a step.
func (x *sharing) start() {
	if x.Staging == nil { // else the first pass overwrites them
		x.dev.Ops.Zero(x.Grads)
	}
}

// order returns the buckets in the order of a forward pass.
func (x *sharing) order() []int {
	buckets := []int{model.Embedding, x.Flat.Vectors()}
	for b := model.Layer(0); b <= x.Flat.Head(); b++ {
		buckets = append(buckets, b)
	}
	return buckets
}

// step ends a step: it waits for the gradients, adds their squares to norm2, reduces sums, which include norm2, over
// the ranks, clips, updates, and begins to gather the weights. norm2 then holds the squared norm of the scaled gradient
// before clipping.
func (x *sharing) step(sums, norm2 View, u optim.Update) error {
	x.label.part("optimizer", -1)
	defer x.label.part("", -1)
	for at := range x.reduces {
		x.waitAndAccumulate(at)
	}
	x.SumSquares(x.dev.Optim, norm2)
	if err := x.sum(sums); err != nil {
		return fmt.Errorf("loss and gradient norm: %w", err)
	}
	for _, b := range x.order() {
		if x.Flat.Buckets[b].Size() == 0 {
			continue
		}
		x.Update(x.dev.Optim, b, norm2, u)
		if err := x.gather(b); err != nil {
			return err
		}
	}
	return nil
}

func (x *sharing) sum(v View) error {
	if x.world.Size() == 1 {
		return nil
	}
	p, err := x.world.AllReduce(v, comm.Sum)
	if err == nil {
		p.Wait()
	}
	return err
}

// publish copies loaded weights to the model, here and on the other ranks.
func (x *sharing) publish() error {
	for _, b := range x.order() {
		if x.Flat.Buckets[b].Size() == 0 {
			continue
		}
		x.CopyCompute(x.dev.Ops, b)
		if err := x.gather(b); err != nil {
			return err
		}
	}
	return nil
}

// gather begins an all-gather of a bucket's weights.
func (x *sharing) gather(bucket int) error {
	dst, src := x.Gathered(bucket)
	if dst.IsZero() || dst == src {
		return nil
	}
	if x.groups[bucket].Size() == 1 {
		x.dev.Ops.Copy(dst, src)
		return nil
	}
	p, err := x.groups[bucket].AllGather(dst, src)
	if err != nil {
		return fmt.Errorf("gathering weights: %w", err)
	}
	x.gathers[bucket] = p
	return nil
}

func (x *sharing) flush() {
	x.label.part("weights", -1)
	defer x.label.part("", -1)
	for b := range x.gathers {
		x.arrive(b)
	}
}
