package train

import (
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// A wire reduces gradients between ranks: in float32 with the group's own reduction or, with memory to send from, in
// bf16 with sums in float32. Each rank then rounds its gradients, also its own part, the ranks exchange the parts, and
// the owner of a part adds them in rank order. A reduction of the group would also sum in bf16.
type wire struct {
	ops  model.Elementwise
	send View // bf16, the largest bucket; zero: float32
	last *halfSum
}

// reduceScatter begins the sum of the ranks' src, Size equal parts in float32. It leaves part Rank in dst, which may be
// that part of src. In bf16 it overwrites the other parts of src, which hold the received parts until Wait, and waits
// for the last call, whose rounded gradients use the same memory.
func (w *wire) reduceScatter(g comm.Communicator, dst, src View) (comm.Pending, error) {
	if w.send.IsZero() {
		return g.ReduceScatter(dst, src, comm.Sum)
	}
	if w.last != nil {
		w.last.Wait()
	}
	ranks, own, n := g.Size(), g.Rank(), src.Size()/g.Size()
	rounded := state.Part(w.send, 0, src.Size())
	w.ops.Copy(rounded, src)
	sum := &halfSum{ops: w.ops, dst: dst, parts: make([]View, ranks)}
	sum.parts[own] = state.Part(rounded, own*n, (own+1)*n)
	var send, recv []comm.Message
	for i := 1; i < ranks; i++ { // the next rank first, so that not all begin with the same
		p := (own + i) % ranks
		sum.parts[p] = halfOf(state.Part(src, p*n, (p+1)*n))
		send = append(send, comm.Message{Peer: p, View: state.Part(rounded, p*n, (p+1)*n)})
		recv = append(recv, comm.Message{Peer: p, View: sum.parts[p]})
	}
	var err error
	if sum.Pending, err = g.Exchange(send, recv); err != nil {
		return nil, err
	}
	w.last = sum
	return sum, nil
}

// halfOf returns the first half of a float32 vector's memory, for as many elements of bf16.
func halfOf(v View) View { return tensor.Dense(v.Memory(), tensor.BF16, 2*v.Offset(), v.Shape()) }

// A halfSum is an exchange of the parts of a sum, and the sum.
type halfSum struct {
	comm.Pending
	ops   model.Elementwise
	dst   View
	parts []View // by rank; nil: added
}

// Wait makes the compute stream wait for the parts and add them. The second call does nothing.
func (s *halfSum) Wait() {
	if s.parts == nil {
		return
	}
	s.Pending.Wait()
	s.ops.Copy(s.dst, s.parts[0])
	for _, part := range s.parts[1:] {
		s.ops.Add(s.dst, part)
	}
	s.parts = nil
}
