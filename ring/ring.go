// Package ring composes attention over the ranks that share a sequence: it moves keys and
// values from rank to rank beside the kernel calls that read them. Which rows move when, and
// what is computed in each hop, is a Schedule; the loops here run any of them, on any device.
package ring

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/tensor"
)

// View is a strided window onto device memory; see internal/tensor.
type View = tensor.View

// Exchanger is what the ring needs of a comm.Communicator.
type Exchanger interface {
	Exchange(send, recv []comm.Message) (comm.Pending, error)
}

var _ Exchanger = comm.Communicator(nil)

// Ring runs schedules on one rank. Kernel and Comm queue on the same compute Stream.
type Ring struct {
	Kernel attention.Kernel
	Comm   Exchanger
	Stream tensor.Stream
	Arena  *tensor.Arena // workspace: borrowed during a call
	Label  string        // what the calls belong to, in traces: "layer 3 "
}

// Forward sets out to attention of the local queries against the keys of all ranks. q:
// [batch, local queries, heads, dim]; k, v: [batch, local keys, kvHeads, dim], dense. out.O is
// of the type of q or of an accumulator. It queues its work and returns; out is complete when
// the stream gets there.
func (r *Ring) Forward(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark) // every transfer has been waited for by then
	bufs := r.buffers(kv{k, v}, s.KVRows)
	acc := r.accumulator(out)
	if err := r.Kernel.Reset(acc); err != nil {
		return err
	}
	if k, ok := r.Kernel.(attention.Folder); ok {
		k.Into(out.O)
	}
	for i := range s.Forward {
		hop := &s.Forward[i]
		r.Stream.Label(r.Label + hop.Label)
		err := r.beside(hop, bufs, nil, func() error {
			if len(hop.Tiles) == 0 {
				return nil
			}
			b := bufs[hop.Keys.Buf].rows(0, hop.Keys.Hi)
			return r.Kernel.Forward(acc, q, b.k, b.v, hop.Tiles, p)
		})
		if err != nil {
			return fmt.Errorf("forward %s: %w", hop.Label, err)
		}
	}
	r.Stream.Label("")
	return r.Kernel.Finish(out.O, acc)
}

// Backward sets g to the gradients of the local queries, keys and values, given do, the
// gradient of out.O, and out of the whole forward pass.
func (r *Ring) Backward(g attention.Grads, do, q, k, v View, out attention.Partial, s *Schedule, p attention.Softmax) error {
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	bufs := r.buffers(kv{k, v}, s.KVRows)
	grads := r.buffers(kv{g.DK, g.DV}, s.GradRows)
	saved := attention.Saved{O: out.O, LSE: out.LSE, Delta: r.alloc(out.LSE.DType(), out.LSE)}
	if err := r.Kernel.ResetGrads(g); err != nil {
		return err
	}
	if err := r.Kernel.Delta(saved.Delta, do, out.O); err != nil {
		return err
	}
	for i := range s.Backward {
		hop := &s.Backward[i]
		r.Stream.Label(r.Label + hop.Label)
		err := r.beside(hop, bufs, grads, func() error {
			if len(hop.Tiles) == 0 {
				return r.finish(g, i, s)
			}
			if b := hop.Grads; b.Buf != 0 {
				d := grads[b.Buf].rows(b.Lo, b.Hi)
				if err := r.Kernel.ResetGrads(attention.Grads{DK: d.k, DV: d.v}); err != nil {
					return err
				}
			}
			b, d := bufs[hop.Keys.Buf].rows(0, hop.Keys.Hi), grads[hop.Grads.Buf].rows(0, hop.Keys.Hi)
			acc := attention.Grads{DQ: g.DQ, DK: d.k, DV: d.v}
			if k, ok := r.Kernel.(attention.Folder); ok && hop.foldsFirst() {
				k.Hold(acc)
			}
			if err := r.Kernel.Backward(acc, do, q, b.k, b.v, saved, hop.Tiles, p); err != nil {
				return err
			}
			return r.finish(g, i, s)
		})
		for _, f := range hop.Fold {
			if err == nil {
				err = r.add(grads[f.Dst.Buf].rows(f.Dst.Lo, f.Dst.Hi), grads[f.Src.Buf].rows(f.Src.Lo, f.Src.Hi))
			}
		}
		if err != nil {
			return fmt.Errorf("backward %s: %w", hop.Label, err)
		}
	}
	r.Stream.Label("")
	if len(s.Backward) == 0 {
		return r.Kernel.FinishGrads(g)
	}
	return nil
}

// add adds src to dst, gradients of keys and of values.
func (r *Ring) add(dst, src kv) error {
	if k, ok := r.Kernel.(attention.Folder); ok {
		return k.AddGrads(attention.Grads{DK: dst.k, DV: dst.v}, attention.Grads{DK: src.k, DV: src.v})
	}
	if err := r.Kernel.Add(dst.k, src.k); err != nil {
		return err
	}
	return r.Kernel.Add(dst.v, src.v)
}

// finish completes DQ in the last hop, beside the gradients on their way home.
func (r *Ring) finish(g attention.Grads, hop int, s *Schedule) error {
	if hop < len(s.Backward)-1 {
		return nil
	}
	return r.Kernel.FinishGrads(g)
}

// beside begins the hop's transfers, queues its kernel calls, and makes the stream wait for
// the transfers. Nothing here waits on the host.
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
