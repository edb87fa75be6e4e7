// Package ring composes attention over the ranks that share a sequence: it moves keys and
// values from rank to rank beside the kernel calls that read them. A Schedule says which rows move when,
// and which kernel calls a hop makes; the loops here run any schedule, on any device.
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
	Mover  Mover // packs heads that travel, and copies own rows; for schedules that do so
	Stream tensor.Stream
	Arena  *tensor.Arena // workspace: borrowed during a call; needed
	Label  string        // begins the names of the calls in traces: "step 7/forward/layer 3"
}

// Forward sets out to attention of the local queries against the keys of all ranks. q:
// [batch, local queries, heads, dim]; k, v: [batch, local keys, kvHeads, dim], dense. out.O is
// of the type of q or of an accumulator. It queues its work and returns; out is complete when
// the stream gets there.
func (r *Ring) Forward(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	if r.Arena == nil {
		return errNoArena
	}
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark) // every transfer has been waited for by then
	tq, tk, tv := r.traded(s.Q, q), r.traded(s.KV, k), r.traded(s.KV, v)
	o, lse := r.traded(s.Q, out.O), r.traded(s.Q, out.LSE)
	p, bias, _, largest := r.scores(s, p, false)
	err := r.there(s, tq, tk, tv, bias)
	if err == nil && s.computes() {
		err = r.forward(attention.Partial{O: o.all, LSE: lse.all}, tq.all, tk.all, tv.all, s, p)
	}
	if err != nil {
		return err
	}
	return r.back(s, o, lse, largest)
}

// forward runs the hops on the gathered rows, once for each group of heads.
func (r *Ring) forward(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	p, at, err := s.place(p)
	if err != nil {
		return err
	}
	keys, err := r.keys(s, s.Forward, q, k, v, at)
	for g := 0; g < len(keys.groups) && err == nil; g++ {
		err = r.forwardOf(keys, g, keys.groups[g].partial(out), of(q, keys.groups[g].q), p)
	}
	r.Stream.Label(r.Label)
	return err
}

func (r *Ring) forwardOf(keys *keys, g int, out attention.Partial, q View, p attention.Softmax) error {
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	bufs := keys.bufs(g)
	pass, err := r.Kernel.Forward(out.O, r.accumulator(out), q, p)
	if err != nil {
		return err
	}
	for i := range keys.hops {
		hop := &keys.hops[i]
		r.Stream.Label(r.part(keys.labels[g] + hop.Label))
		moving, err := keys.begin(i, bufs, nil)
		if err == nil {
			err = keys.beside(hop, moving, func(c *Part, _ bool) error {
				if len(c.Tiles) == 0 {
					return nil
				}
				return pass.Block(keys.block(c, bufs))
			})
		}
		if err == nil && i == 0 {
			err = keys.prefetch(g + 1)
		}
		if err != nil {
			return fmt.Errorf("forward %s: %w", hop.Label, err)
		}
	}
	return pass.End()
}

// Backward sets g to the gradients of the local queries, keys and values, given do, the
// gradient of out.O, and out of the whole forward pass.
func (r *Ring) Backward(g attention.Grads, do, q, k, v View, out attention.Partial, s *Schedule, p attention.Softmax) error {
	if r.Arena == nil {
		return errNoArena
	}
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	tq, tdo, o, lse := r.traded(s.Q, q), r.traded(s.Q, do), r.traded(s.Q, out.O), r.traded(s.Q, out.LSE)
	tk, tv := r.traded(s.KV, k), r.traded(s.KV, v)
	dq, dk, dv := r.traded(s.Q, g.DQ), r.traded(s.KV, g.DK), r.traded(s.KV, g.DV)
	p, bias, dbias, _ := r.scores(s, p, true)
	err := r.there(s, tq, tdo, o, lse, tk, tv, bias)
	if err == nil && s.computes() {
		err = r.backward(attention.Grads{DQ: dq.all, DK: dk.all, DV: dv.all}, tdo.all, tq.all, tk.all, tv.all,
			attention.Partial{O: o.all, LSE: lse.all}, s, p)
	}
	if err != nil {
		return err
	}
	return r.back(s, dq, dk, dv, dbias)
}

// backward runs the hops on the gathered rows, once for each group of heads.
func (r *Ring) backward(g attention.Grads, do, q, k, v View, out attention.Partial, s *Schedule, p attention.Softmax) error {
	p, at, err := s.place(p)
	if err != nil {
		return err
	}
	keys, err := r.keys(s, s.Backward, q, k, v, at)
	for i := 0; i < len(keys.groups) && err == nil; i++ {
		h := keys.groups[i]
		err = r.backwardOf(keys, i, h.grads(g), of(do, h.q), of(q, h.q), h.partial(out), s.GradRows, p)
	}
	r.Stream.Label(r.Label)
	return err
}

func (r *Ring) backwardOf(keys *keys, g int, own attention.Grads, do, q View, out attention.Partial, rows []int, p attention.Softmax) error {
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	bufs, grads := keys.bufs(g), r.buffers(kv{own.DK, own.DV}, rows)
	saved := attention.Saved{O: out.O, LSE: out.LSE, Delta: r.alloc(out.LSE.DType(), out.LSE)}
	pass, err := r.Kernel.Backward(own.DQ, do, q, saved, p)
	if err != nil {
		return err
	}
	for i := range keys.hops {
		hop := &keys.hops[i]
		r.Stream.Label(r.part(keys.labels[g] + hop.Label))
		moving, err := keys.begin(i, bufs, grads)
		if err == nil {
			err = keys.beside(hop, moving, func(c *Part, last bool) error {
				if c.Grads.Hi > 0 { // also without tiles: it sets the own gradients
					if err := pass.Block(keys.gradBlock(c, bufs, grads, last && hop.foldsFirst(c))); err != nil {
						return err
					}
				}
				if last && i == len(keys.hops)-1 {
					return pass.End() // beside the gradients on their way home
				}
				return nil
			})
		}
		if err == nil && i == 0 {
			err = keys.prefetch(g + 1)
		}
		for _, f := range hop.Fold {
			if err == nil {
				err = pass.Fold(f.of(grads))
			}
		}
		if err != nil {
			return fmt.Errorf("backward %s: %w", hop.Label, err)
		}
	}
	return nil
}

// beside queues the hop's kernel calls beside its transfers, each after the rows that it waits for, and
// makes the stream wait for the rest. The host waits for no device here; comm.Pending says for what
// it may wait. call is told which call is the last of the hop.
func (m *keys) beside(h *Hop, moving flight, call func(c *Part, last bool) error) error {
	if err := call(h.own(), len(h.Then) == 0); err != nil {
		return err
	}
	for i := range h.Then {
		moving.gates[i].Wait()
		if err := call(&h.Then[i], i == len(h.Then)-1); err != nil {
			return err
		}
	}
	m.arrive(h, moving.rest)
	return nil
}

// part returns the label of a hop.
func (r *Ring) part(hop string) string {
	if r.Label == "" {
		return hop
	}
	return r.Label + "/" + hop
}
