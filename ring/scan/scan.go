// Package scan hands the recurrent state of a layer, and the rows that its convolution reads, from segment to segment
// of a document over the ranks that share a sequence. It is to such layers what package ring is to attention. The step
// of the state over a segment is affine, S' = M S + R, and affine maps compose in any order of ranks. So each rank
// computes the maps of its segments alone, the ranks exchange maps, and each rank gets the state before each segment:
//
//	segments, err := partition.NewSegments(shape)
//	states := scan.NewStates(segments, rank)
//	loop := scan.Scan{Kernel: kernel, Comm: group, Mover: ops, Stream: stream, Arena: arena}
//	err = loop.Forward(args, states, beside)
package scan

import (
	"fmt"
	"path"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Mover queues copies and sums of views, and zeroes them. The operations of kernels/cpu and kernels/gpu implement it.
type Mover interface {
	ring.Mover
	// Zero sets views of any type to 0.
	Zero(vs ...View)
}

// Scan runs schedules on one rank. Kernel, Comm and Mover queue work on the compute Stream.
type Scan struct {
	Kernel delta.Kernel
	Comm   comm.Exchanger
	Mover  Mover
	Stream tensor.Stream
	Arena  *tensor.Arena // workspace
	Label  string        // prefix of labels in traces: "step 7/forward/layer 3"
}

// Moving is an exchange of states between Begin and Finish.
type Moving struct {
	*Scan
	pass         *Pass
	batch        int
	states, maps [2]View      // the caller's, then workspace
	came         comm.Pending // nil: nothing moves
}

// Begin queues the first round of a pass, and Finish the others. Local work between them runs beside the first round.
// It must not touch the arguments. maps, [len(p.Maps)*batch, heads, dim, dim+dimV], has the maps M | R of the segments
// that p.Maps lists, and is workspace from then on. In the backward pass they are M^T | N. Finish sets states,
// [len(p.States)*batch, heads, dim, dimV], to the states before the segments that p.States lists; in the backward pass,
// to the gradients of the states after them. Both are dense, of the type in which maps are composed, and have a
// segment's samples side by side. Begin allocates workspace from the arena, which the caller releases after Finish.
func (s *Scan) Begin(states, maps View, p *Pass) (*Moving, error) {
	n, m := states.Len(tensor.Batch), maps.Len(tensor.Batch)
	batch := (n + m) / max(1, len(p.States)+len(p.Maps))
	if n != batch*len(p.States) || m != batch*len(p.Maps) {
		return nil, fmt.Errorf("%d states and %d maps; the pass has %d and %d for each sample", n, m, len(p.States),
			len(p.Maps))
	}
	heads, dim, dimV := states.Len(tensor.Seq), states.Len(tensor.Heads), states.Len(tensor.Dim)
	work := func(slots, cols int) View { return s.Arena.Alloc(states.DType(), slots*batch, heads, dim, cols) }
	x := &Moving{Scan: s, pass: p, batch: batch,
		states: [2]View{states, work(p.StateSlots-len(p.States), dimV)},
		maps:   [2]View{maps, work(p.MapSlots-len(p.Maps), dim+dimV)}}
	defer s.label(round(0))()
	for _, r := range p.Results {
		result := x.view(Slot{At: r.Map}).Slice(tensor.Dim, dim, dim+dimV)
		s.Mover.Copy(x.view(Slot{State: true, At: r.State}), result)
	}
	return x, x.exchange(0)
}

// Finish queues the remaining rounds.
func (x *Moving) Finish() error {
	defer x.Stream.Label(x.Label)
	for i := range x.pass.Rounds {
		x.label(round(i))
		if i > 0 {
			if err := x.exchange(i); err != nil {
				return err
			}
		}
		if x.came != nil {
			x.came.Wait()
		}
		for _, c := range x.pass.Rounds[i].Compose {
			if err := x.Kernel.Compose(x.view(c.Dst), x.view(c.Later), x.view(c.Earlier)); err != nil {
				return fmt.Errorf("%s: %w", round(i), err)
			}
		}
	}
	return nil
}

// exchange begins the transfers of a round.
func (x *Moving) exchange(i int) (err error) {
	if x.came = nil; i >= len(x.pass.Rounds) {
		return nil
	}
	r := &x.pass.Rounds[i]
	if len(r.Send)+len(r.Recv) > 0 {
		if x.came, err = x.Comm.Exchange(x.messages(r.Send), x.messages(r.Recv)); err != nil {
			return fmt.Errorf("%s: %w", round(i), err)
		}
	}
	return nil
}

// label names later work for traces, until the returned call.
func (s *Scan) label(part string) (end func()) {
	s.Stream.Label(path.Join(s.Label, part))
	return func() { s.Stream.Label(s.Label) }
}

func round(i int) string { return fmt.Sprintf("states round %d", i) }

func (x *Moving) messages(moves []Move) (list []comm.Message) {
	for _, m := range moves {
		list = append(list, comm.Message{Peer: m.Peer, View: x.view(m.Slot)})
	}
	return list
}

func (x *Moving) view(s Slot) View {
	of, own, at := &x.maps, len(x.pass.Maps), s.At
	if s.State {
		of, own = &x.states, len(x.pass.States)
	}
	v := of[0]
	if at >= own {
		v, at = of[1], at-own
	}
	return v.Slice(tensor.Batch, at*x.batch, (at+1)*x.batch)
}
