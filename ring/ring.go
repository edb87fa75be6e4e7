// Package ring composes attention over the ranks that share a sequence: it moves keys and
// values from rank to rank beside the kernel calls that read them. Which rows move when, and
// what is computed in each hop, is a Schedule; the loops here run any of them, on any device.
package ring

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Ring runs schedules on one rank. Kernel and Comm queue on the same compute Stream.
type Ring struct {
	Kernel attention.Kernel
	Comm   comm.Exchanger
	Stream tensor.Stream
	Arena  *tensor.Arena // workspace: borrowed during a call
	Label  string        // what the calls are a part of, in traces: "step 7/forward/layer 3"
}

// Forward sets out to attention of the local queries against the keys of all ranks. q:
// [batch, local queries, heads, dim]; k, v: [batch, local keys, kvHeads, dim], dense. out.O is
// of the type of q or of an accumulator. It queues its work and returns; out is complete when
// the stream gets there.
func (r *Ring) Forward(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	if err := s.unsupported(); err != nil {
		return err
	}
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark) // every transfer has been waited for by then
	bufs := r.buffers(kv{k, v}, s.KVRows)
	p, at, err := s.place(p)
	if err != nil {
		return err
	}
	pass, err := r.Kernel.Forward(out.O, r.accumulator(out), q, p)
	if err != nil {
		return err
	}
	for i := range s.Forward {
		hop := &s.Forward[i]
		r.Stream.Label(r.part(hop.Label))
		err := r.beside(hop, bufs, nil, func() error {
			if len(hop.Tiles) == 0 {
				return nil
			}
			return pass.Block(hop.block(bufs, at))
		})
		if err != nil {
			return fmt.Errorf("forward %s: %w", hop.Label, err)
		}
	}
	r.Stream.Label(r.Label)
	return pass.End()
}

// Backward sets g to the gradients of the local queries, keys and values, given do, the
// gradient of out.O, and out of the whole forward pass.
func (r *Ring) Backward(g attention.Grads, do, q, k, v View, out attention.Partial, s *Schedule, p attention.Softmax) error {
	if err := s.unsupported(); err != nil {
		return err
	}
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	bufs := r.buffers(kv{k, v}, s.KVRows)
	grads := r.buffers(kv{g.DK, g.DV}, s.GradRows)
	p, at, err := s.place(p)
	if err != nil {
		return err
	}
	saved := attention.Saved{O: out.O, LSE: out.LSE, Delta: r.alloc(out.LSE.DType(), out.LSE)}
	pass, err := r.Kernel.Backward(g.DQ, do, q, saved, p)
	if err != nil {
		return err
	}
	for i := range s.Backward {
		hop := &s.Backward[i]
		r.Stream.Label(r.part(hop.Label))
		err := r.beside(hop, bufs, grads, func() error {
			if hop.Grads.Hi > 0 { // without tiles, too: the own gradients are to be set
				if err := pass.Block(hop.gradBlock(bufs, grads, at)); err != nil {
					return err
				}
			}
			if i == len(s.Backward)-1 {
				return pass.End() // beside the gradients on their way home
			}
			return nil
		})
		for _, f := range hop.Fold {
			if err == nil {
				err = pass.Fold(f.of(grads))
			}
		}
		if err != nil {
			return fmt.Errorf("backward %s: %w", hop.Label, err)
		}
	}
	r.Stream.Label(r.Label)
	return nil
}

// beside begins the hop's transfers, queues its kernel calls, and makes the stream wait for
// the transfers. The host waits for no device here; comm.Pending says for what it may wait.
func (r *Ring) beside(hop *Hop, bufs, grads []kv, call func() error) error {
	send := messages(messages(nil, hop.SendKV, bufs), hop.SendGrad, grads)
	recv := messages(messages(nil, hop.RecvKV, bufs), hop.RecvGrad, grads)
	var pending comm.Pending
	if len(send)+len(recv) > 0 {
		var err error
		if pending, err = r.Comm.Exchange(send, recv); err != nil {
			return err
		}
	}
	if err := call(); err != nil {
		return err
	}
	if pending != nil {
		pending.Wait()
	}
	return nil
}

// part is the label of a hop.
func (r *Ring) part(hop string) string {
	if r.Label == "" {
		return hop
	}
	return r.Label + "/" + hop
}
