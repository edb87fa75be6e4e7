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

// Ring runs schedules on one rank. Kernel, Comm and Mover queue on the same compute Stream.
type Ring struct {
	Kernel attention.Kernel
	Comm   comm.Exchanger
	Mover  Mover // packs heads that travel; needed by schedules that trade them
	Stream tensor.Stream
	Arena  *tensor.Arena // workspace: borrowed during a call
	Label  string        // what the calls are a part of, in traces: "step 7/forward/layer 3"
}

// Forward sets out to attention of the local queries against the keys of all ranks. q:
// [batch, local queries, heads, dim]; k, v: [batch, local keys, kvHeads, dim], dense. out.O is
// of the type of q or of an accumulator. It queues its work and returns; out is complete when
// the stream gets there.
func (r *Ring) Forward(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark) // every transfer has been waited for by then
	tq, tk, tv := r.traded(s.Q, q), r.traded(s.KV, k), r.traded(s.KV, v)
	o, lse := r.traded(s.Q, out.O), r.traded(s.Q, out.LSE)
	err := r.there(s, tq, tk, tv)
	if err == nil && s.computes() {
		err = r.forward(attention.Partial{O: o.all, LSE: lse.all}, tq.all, tk.all, tv.all, s, p)
	}
	if err != nil {
		return err
	}
	return r.back(s, o, lse)
}

// forward runs the hops on what has been gathered.
func (r *Ring) forward(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
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
		err := r.beside(hop, bufs, nil, func(c *Part, _ bool) error {
			if len(c.Tiles) == 0 {
				return nil
			}
			return pass.Block(c.block(bufs, at))
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
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	tq, tdo, o, lse := r.traded(s.Q, q), r.traded(s.Q, do), r.traded(s.Q, out.O), r.traded(s.Q, out.LSE)
	tk, tv := r.traded(s.KV, k), r.traded(s.KV, v)
	dq, dk, dv := r.traded(s.Q, g.DQ), r.traded(s.KV, g.DK), r.traded(s.KV, g.DV)
	err := r.there(s, tq, tdo, o, lse, tk, tv)
	if err == nil && s.computes() {
		err = r.backward(attention.Grads{DQ: dq.all, DK: dk.all, DV: dv.all}, tdo.all, tq.all, tk.all, tv.all,
			attention.Partial{O: o.all, LSE: lse.all}, s, p)
	}
	if err != nil {
		return err
	}
	return r.back(s, dq, dk, dv)
}

// backward runs the hops on what has been gathered.
func (r *Ring) backward(g attention.Grads, do, q, k, v View, out attention.Partial, s *Schedule, p attention.Softmax) error {
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
		err := r.beside(hop, bufs, grads, func(c *Part, last bool) error {
			if c.Grads.Hi > 0 { // without tiles, too: the own gradients are to be set
				if err := pass.Block(c.gradBlock(bufs, grads, at, last && hop.foldsFirst(c))); err != nil {
					return err
				}
			}
			if last && i == len(s.Backward)-1 {
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

// beside begins the hop's transfers, queues its kernel calls, each behind the rows that it waits
// for, and makes the stream wait for the rest. The host waits for no device here; comm.Pending
// says for what it may wait. call is told which call is the last of the hop.
func (r *Ring) beside(hop *Hop, bufs, grads []kv, call func(c *Part, last bool) error) error {
	gates := make([]comm.Pending, len(hop.Then))
	for i := range hop.Then {
		var err error
		if gates[i], err = r.exchange(messages(nil, hop.Then[i].SendKV, bufs), messages(nil, hop.Then[i].RecvKV, bufs)); err != nil {
			return err
		}
	}
	rest, err := r.exchange(messages(messages(nil, hop.SendKV, bufs), hop.SendGrad, grads),
		messages(messages(nil, hop.RecvKV, bufs), hop.RecvGrad, grads))
	if err != nil {
		return err
	}
	if err := call(hop.own(), len(hop.Then) == 0); err != nil {
		return err
	}
	for i := range hop.Then {
		gates[i].Wait()
		if err := call(&hop.Then[i], i == len(hop.Then)-1); err != nil {
			return err
		}
	}
	rest.Wait()
	return nil
}

// part is the label of a hop.
func (r *Ring) part(hop string) string {
	if r.Label == "" {
		return hop
	}
	return r.Label + "/" + hop
}
