package train

import (
	"slices"

	"github.com/cprun/cprun/internal/model/optim"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// An updater steps masters and moments that are in host memory (as ZeRO-Offload, arXiv:2101.06840, keeps them). Pieces
// go through the device, where the usual kernel updates them, so the bits are those of a state on the device. Three
// slots let one piece arrive while another is updated and a third leaves. All three streams run beside the passes: the
// next forward pass waits only for the weights that it reads.
type updater struct {
	*state.State
	dev           *Device
	in, work, out tensor.Stream
	optim         optim.Device                   // on work
	free          [state.PieceSlots]tensor.Event // the ends of the slots' last uses; nil: never used
	next          int                            // slot of the next piece

	norm2  View           // of the step in progress
	step   optim.Update   // likewise
	order  []int          // of the buckets
	queued int            // updates of the step that are queued, in that order
	fresh  []tensor.Event // by bucket: the end of its update; nil: followed, or not queued
}

// newUpdater returns the updater of a state, after the compute stream's work so far, which zeroes it.
func newUpdater(dev *Device, s *state.State) (*updater, error) {
	u := &updater{State: s, dev: dev, order: updates(s.Flat), fresh: make([]tensor.Event, len(s.Flat.Buckets))}
	u.queued = len(u.order)
	for _, n := range []struct {
		to   *tensor.Stream
		name string
	}{{&u.in, "state in"}, {&u.work, "update"}, {&u.out, "state out"}} {
		var err error
		if *n.to, err = newStream(dev, n.name); err != nil {
			return nil, err
		}
	}
	u.in.Wait(dev.Stream.Record())
	u.optim = dev.NewOptim(u.work)
	var err error
	u.norm2, err = dev.Vector("gradient norm", tensor.F64, 1)
	return u, err
}

// begin begins the updates of a step, with a squared norm of its gradients that the next step overwrites. They follow
// all work of the compute stream so far, which writes the gradients and reads the old weights.
func (u *updater) begin(norm2 View, step optim.Update) {
	u.queue(len(u.order)) // the rest of the step before
	u.work.Wait(u.dev.Stream.Record())
	u.dev.Store.Copy(u.work, u.norm2, norm2)
	u.dev.Store.Follow(u.work.Record())
	u.in.Wait(u.out.Record()) // the copies of the step before, of state that is read again
	u.step, u.queued = step, 0
}

// follow makes the compute stream follow the update of a bucket. It queues updates up to the next bucket: all at once
// are more copies than a GPU's queue holds, and the host would wait until most are done.
func (u *updater) follow(bucket int) {
	u.queue(slices.Index(u.order, bucket) + 2)
	if e := u.fresh[bucket]; e != nil {
		u.dev.Store.Follow(e)
		u.fresh[bucket] = nil
	}
}

// queue queues the updates of the first n buckets that are not queued yet.
func (u *updater) queue(n int) {
	for ; u.queued < min(n, len(u.order)); u.queued++ {
		bucket := u.order[u.queued]
		u.update(bucket)
		u.fresh[bucket] = u.work.Record()
	}
}

// update queues the update of this rank's part of a bucket.
func (u *updater) update(bucket int) {
	fields := []View{u.Held(u.Masters, bucket), u.Held(u.M, bucket), u.Held(u.V, bucket)}
	u.pieces(fields, func(lo int, p []View) (end tensor.Event) {
		u.work.Wait(u.in.Record())
		u.Step(u.optim, bucket, lo, p[0], p[1], p[2], u.norm2, u.step)
		u.out.Wait(u.work.Record())
		for i, v := range p {
			u.dev.Store.Copy(u.out, state.Part(fields[i], lo, lo+v.Size()), v)
		}
		return u.out.Record()
	})
}

// publish copies this rank's masters of a bucket to the model's copy.
func (u *updater) publish(bucket int) {
	u.pieces([]View{u.Held(u.Masters, bucket)}, func(lo int, p []View) (end tensor.Event) {
		u.dev.Store.Follow(u.in.Record())
		u.dev.Ops.Copy(u.Copied(bucket, lo, p[0].Size()), p[0])
		return u.dev.Stream.Record()
	})
}

// pieces brings pieces of host vectors to slots, and calls f to queue their use, which ends with an event.
func (u *updater) pieces(fields []View, f func(lo int, p []View) (end tensor.Event)) {
	n, most := fields[0].Size(), u.Pieces[0][0].Size()
	for lo := 0; lo < n; lo += most {
		i := u.next
		u.next = (u.next + 1) % state.PieceSlots
		if u.free[i] != nil {
			u.in.Wait(u.free[i])
		}
		p := make([]View, len(fields))
		for j, v := range fields {
			p[j] = state.Part(u.Pieces[i][j], 0, min(most, n-lo))
			u.dev.Store.Copy(u.in, p[j], state.Part(v, lo, lo+p[j].Size()))
		}
		u.free[i] = f(lo, p)
	}
}

// flush makes the compute stream follow all updates, and their copies to the host.
func (u *updater) flush() {
	u.queue(len(u.order))
	u.dev.Store.Follow(u.out.Record())
}
