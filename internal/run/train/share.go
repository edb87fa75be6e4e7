package train

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/model/state"
)

// sharing moves gradients and weights between ranks, bucket by bucket, while passes run. It reduces the gradients of a
// bucket as soon as a backward pass is done with it, and gathers weights as resident plans. The transfers have their
// own communicators, so that the ring does not wait for them.
//
// One rule orders all use of shared memory: a buffer belongs to a stream, and each hand-over is an event of its
// producer. A transfer begins after the work that the compute stream has at the call, so a call follows the last work
// that reads or writes the buffer, and Wait comes before the next.
type sharing struct {
	*state.State
	dev     *Device
	world   comm.Communicator   // all ranks, for sums over all gradients
	groups  []comm.Communicator // by bucket: the ranks that share its gradients and weights
	weights []comm.Communicator // by bucket: the ranks that gather its weights
	across  comm.Communicator   // the ranks with the same part of the weights; nil: this one alone

	label labels // of queued work

	resident state.Residence
	updater  *updater       // nil: the optimizer's state is on the device
	gathers  []pendings     // by slot
	spreads  []comm.Pending // by bucket: updated weights on their way between copies; nil if complete
	stale    []bool         // by bucket: weights are updated, and codes not yet
	reduces  []reduction    // by bucket, or by staging buffer
	first    bool           // first pass of the step
	last     bool           // last pass of the step

	wire wire
}

type reduction struct {
	comm.Pending // nil: none
	bucket       int
	add          bool // add the result to the gradients
}

func newSharing(d *Device, s *state.State) *sharing {
	x := &sharing{State: s, dev: d, label: labels{flat: s.Flat},
		gathers: make([]pendings, len(s.Flat.Buckets)), spreads: make([]comm.Pending, len(s.Flat.Buckets)),
		stale: make([]bool, len(s.Flat.Buckets))}
	x.resident = state.Residence{Flat: s.Flat, Slot: s.Slot, Holds: map[int]int{}, Gather: x.gather}
	x.reduces = make([]reduction, len(s.Flat.Buckets))
	if s.Staging != nil {
		x.reduces = make([]reduction, state.Stages(state.LeastSlots))
	}
	x.wire = wire{ops: d.Ops, send: s.Wire}
	return x
}

// join sets the groups that share the buckets. Call it before the first pass.
func (x *sharing) join(world comm.Communicator, groups, weights []comm.Communicator, across comm.Communicator) error {
	for b, g := range groups {
		if want := x.Group(b); g.Rank() != want.Rank || g.Size() != want.Size {
			return fmt.Errorf("bucket %d: rank %d of a group of %d, but the layout is for %+v", b, g.Rank(), g.Size(),
				want)
		}
	}
	x.world, x.groups, x.weights, x.across = world, groups, weights, across
	return nil
}

func (x *sharing) hooks() model.Hooks { return model.Hooks{Use: x.use, Begin: x.begin, Done: x.done} }

// use begins to gather the weights of the next bucket, and makes the compute stream wait for those of this one. Unless
// an update comes before it, the next pass begins with the embedding.
func (x *sharing) use(bucket, next int) error {
	x.label.part("forward", bucket)
	if next == model.NoBucket && !x.last {
		next = x.Flat.Embedding()
	}
	err := x.resident.Use(bucket, next)
	for _, b := range x.Flat.With(bucket) {
		x.gathers[x.Slot(b)].arrive()
	}
	return err
}

// idle takes part in the gathers of other ranks' forward passes, and waits for all weights.
func (x *sharing) idle(passes int) error {
	buckets := append(order(x.Flat), model.NoBucket)
	for range passes {
		for i, next := range buckets[1:] {
			if err := x.use(buckets[i], next); err != nil {
				return err
			}
		}
	}
	x.flush()
	return nil
}

// pendings are the gathers of a bucket's weights, trained and frozen; nil if complete.
type pendings [2]comm.Pending

func (p *pendings) arrive() {
	for i := range p {
		arrive(&p[i])
	}
}

// arrive makes the compute stream wait for a transfer.
func arrive(p *comm.Pending) {
	if *p != nil {
		(*p).Wait()
		*p = nil
	}
}

// begin makes the gradients of a bucket fresh in the first pass, and their staging buffer in every pass.
func (x *sharing) begin(bucket int) (fresh bool) {
	x.label.part("backward", bucket)
	if x.Staging == nil || x.Flat.Buckets[bucket].Size() == 0 {
		return x.first
	}
	x.waitAndAccumulate(state.StageOf(x.Flat, bucket, state.LeastSlots))
	return true
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
		at, r.add = state.StageOf(x.Flat, bucket, state.LeastSlots), !x.first
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

// order returns the buckets that a forward pass calls Use with. The pass uses others with them.
func order(flat *model.FlatLayout) []int {
	buckets := []int{flat.Embedding(), flat.Vectors()}
	for b := range flat.Buckets {
		if !flat.Empty(b) && !flat.Scaled(b) && !slices.Contains(buckets[:2], b) {
			buckets = append(buckets, b)
		}
	}
	return buckets
}

// updates returns all buckets with weights in the order of a forward pass.
func updates(flat *model.FlatLayout) (list []int) {
	for _, b := range order(flat) {
		list = append(list, flat.With(b)...)
	}
	return list
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
	if x.updater != nil {
		x.updater.begin(norm2, u)
	}
	return x.renew(func(b int) {
		if x.updater == nil {
			x.Update(x.dev.Optim, b, norm2, u)
		}
	})
}

// renew sets the weights of every bucket, and gathers the first ones for the next pass. With copies it spreads them all
// first, so that the updates go on meanwhile. Of an update that runs beside the passes, it gathers none: the compute
// stream would wait for the whole of it.
func (x *sharing) renew(set func(bucket int)) error {
	x.resident.Forget()
	begin := x.resident.Fill
	if x.across != nil {
		begin = x.spread
	}
	for _, b := range updates(x.Flat) {
		if x.Flat.Buckets[b].Size() > 0 {
			set(b)
			x.stale[b] = x.Flat.Scaled(b)
		}
		if x.updater == nil {
			if err := x.quantize(b); err != nil { // before another update overwrites their input
				return err
			}
		}
		if x.updater != nil && x.across == nil {
			continue
		}
		if err := begin(b); err != nil {
			return err
		}
	}
	return nil
}

// quantize sets the codes of a bucket after an update. Ranks with parts of a row find its factor together.
func (x *sharing) quantize(bucket int) error {
	if !x.stale[bucket] {
		return nil
	}
	x.stale[bucket] = false
	group, rows := x.groups[bucket], x.Flat.Buckets[bucket].Rows
	factors, parts := state.Part(x.Factors, int(rows.Lo), int(rows.Hi)), x.Sharded() && group.Size() > 1
	if parts {
		x.dev.Ops.Zero(factors) // also of other ranks' rows
	}
	x.Quantize(x.dev.Ops, bucket, false)
	if !parts {
		return nil
	}
	p, err := group.AllReduce(factors, comm.Max)
	if err != nil {
		return fmt.Errorf("factors of matrices in E4M3: %w", err)
	}
	p.Wait()
	x.Quantize(x.dev.Ops, bucket, true)
	return nil
}

// spread begins to send this rank's updated part of a bucket to the copies of the model.
func (x *sharing) spread(bucket int) (err error) {
	if x.updater != nil {
		x.updater.follow(bucket)
	}
	if err := x.quantize(bucket); err != nil {
		return err
	}
	if dst, src := x.Spread(bucket); !dst.IsZero() {
		if x.spreads[bucket], err = x.across.AllGather(dst, src); err != nil {
			return fmt.Errorf("spreading weights: %w", err)
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
	return x.renew(func(b int) {
		if x.updater != nil {
			x.updater.publish(b)
		} else {
			x.CopyCompute(x.dev.Ops, b)
		}
	})
}

// gather begins an all-gather of a bucket's weights, after the present work of the compute stream. The last gather into
// the same memory is over: use has waited for it, or gather waits if no use followed.
func (x *sharing) gather(bucket int) error {
	x.gathers[x.Slot(bucket)].arrive()
	if x.updater != nil {
		x.updater.follow(bucket)
	}
	if err := x.quantize(bucket); err != nil {
		return err
	}
	arrive(&x.spreads[bucket])
	for i, of := range []*state.State{x.State, x.Base} {
		if of == nil {
			continue
		}
		dst, src := of.Gathered(bucket)
		if dst.IsZero() || dst == src {
			continue
		}
		if x.weights[bucket].Size() == 1 {
			x.dev.Ops.Copy(dst, src)
			continue
		}
		p, err := x.weights[bucket].AllGather(dst, src)
		if err != nil {
			return fmt.Errorf("gathering weights: %w", err)
		}
		x.gathers[x.Slot(bucket)][i] = p
	}
	return nil
}

func (x *sharing) flush() {
	x.label.part("weights", -1)
	defer x.label.part("", -1)
	for b := range x.gathers {
		x.gathers[b].arrive()
		arrive(&x.spreads[b])
	}
	if x.updater != nil {
		x.updater.flush()
	}
}
