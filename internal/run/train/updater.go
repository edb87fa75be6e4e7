package train

import (
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
	norm2         View                           // of the step in progress
}

// newUpdater returns the updater of a state, after the compute stream's work so far, which zeroes it.
func newUpdater(dev *Device, s *state.State) (*updater, error) {
	u := &updater{State: s, dev: dev}
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

// begin begins a step whose gradients have this squared norm, after the compute stream's work so far: the gradients are
// there, and no pass reads the old weights. It copies norm2, which the next step overwrites.
func (u *updater) begin(norm2 View) {
	u.work.Wait(u.dev.Stream.Record())
	u.dev.Store.Copy(u.work, u.norm2, norm2)
	u.dev.Store.Follow(u.work.Record())
}

// update queues the update of this rank's part of a bucket. It returns the event of the new weights in the model's
// copy.
func (u *updater) update(bucket int, step optim.Update) tensor.Event {
	fields := []View{u.Held(u.Masters, bucket), u.Held(u.M, bucket), u.Held(u.V, bucket)}
	u.pieces(fields, func(lo int, p []View) (end tensor.Event) {
		u.work.Wait(u.in.Record())
		u.Step(u.optim, bucket, lo, p[0], p[1], p[2], u.norm2, step)
		u.out.Wait(u.work.Record())
		for i, v := range p {
			u.dev.Store.Copy(u.out, state.Part(fields[i], lo, lo+v.Size()), v)
		}
		return u.out.Record()
	})
	return u.work.Record()
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
			// A step has as many pieces as there are slots or more: embedding, layers, vectors. So this piece's copy to
			// the host in the step before is no later than the slot's.
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

// flush makes the compute stream follow all copies to the host.
func (u *updater) flush() { u.dev.Store.Follow(u.out.Record()) }
