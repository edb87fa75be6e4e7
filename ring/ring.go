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

// kv is a buffer of keys and values, or of their gradients.
type kv struct{ k, v View }

func (b kv) rows(lo, hi int) kv {
	return kv{b.k.Slice(tensor.Seq, lo, hi), b.v.Slice(tensor.Seq, lo, hi)}
}

// Forward sets acc to attention of the local queries against the keys of all ranks. q:
// [batch, local queries, heads, dim]; k, v: [batch, local keys, kvHeads, dim], dense. It
// queues its work and returns; acc is complete when the stream gets there.
func (r *Ring) Forward(acc attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark) // every transfer has been waited for by then
	bufs := r.buffers(kv{k, v}, s.KVRows)
	if err := r.Kernel.Reset(acc); err != nil {
		return err
	}
	for i := range s.Forward {
		hop := &s.Forward[i]
		r.Stream.Label(r.Label + hop.Label)
		err := r.beside(hop, bufs, nil, func() error {
			b := bufs[hop.Keys.Buf].rows(0, hop.Keys.Hi)
			return r.Kernel.Forward(acc, q, b.k, b.v, hop.Tiles, p)
		})
		if err != nil {
			return fmt.Errorf("forward %s: %w", hop.Label, err)
		}
	}
	r.Stream.Label("")
	return nil
}

// Backward sets g to the gradients of the local queries, keys and values, given do, the
// gradient of acc.O, and acc of the whole forward pass.
func (r *Ring) Backward(g attention.Grads, do, q, k, v View, acc attention.Partial, s *Schedule, p attention.Softmax) error {
	mark := r.Arena.Mark()
	defer r.Arena.Release(mark)
	bufs := r.buffers(kv{k, v}, s.KVRows)
	grads := r.buffers(kv{g.DK, g.DV}, s.GradRows)
	shape := acc.LSE.Shape()
	delta := r.Arena.Alloc(acc.LSE.DType(), shape[:]...)
	if err := r.Kernel.Zero(g.DQ, g.DK, g.DV); err != nil {
		return err
	}
	if err := r.Kernel.Delta(delta, do, acc.O); err != nil {
		return err
	}
	for i := range s.Backward {
		hop := &s.Backward[i]
		r.Stream.Label(r.Label + hop.Label)
		err := r.beside(hop, bufs, grads, func() error {
			if b := hop.Grads; b.Buf != 0 {
				d := grads[b.Buf].rows(b.Lo, b.Hi)
				if err := r.Kernel.Zero(d.k, d.v); err != nil {
					return err
				}
			}
			b, d := bufs[hop.Keys.Buf].rows(0, hop.Keys.Hi), grads[hop.Grads.Buf].rows(0, hop.Keys.Hi)
			return r.Kernel.Backward(attention.Grads{DQ: g.DQ, DK: d.k, DV: d.v}, do, q, b.k, b.v, acc.LSE, delta, hop.Tiles, p)
		})
		for _, f := range hop.Fold {
			dst, src := grads[f.Dst.Buf].rows(f.Dst.Lo, f.Dst.Hi), grads[f.Src.Buf].rows(f.Src.Lo, f.Src.Hi)
			if err == nil {
				err = r.Kernel.Add(dst.k, src.k)
			}
			if err == nil {
				err = r.Kernel.Add(dst.v, src.v)
			}
		}
		if err != nil {
			return fmt.Errorf("backward %s: %w", hop.Label, err)
		}
	}
	r.Stream.Label("")
	return nil
}

// beside begins the hop's transfers, queues its kernel call, and makes the stream wait for
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
	if len(hop.Tiles) > 0 {
		if err := call(); err != nil {
			return err
		}
	}
	if pending != nil {
		pending.Wait()
	}
	return nil
}

// messages appends the views of moves: K then V of each batch element, since rows of one
// element are dense and rows of several are not.
func messages(out []comm.Message, moves []Move, bufs []kv) []comm.Message {
	for _, m := range moves {
		b := bufs[m.Block.Buf].rows(m.Block.Lo, m.Block.Hi)
		for i := range b.k.Len(tensor.Batch) {
			out = append(out,
				comm.Message{Peer: m.Peer, View: b.k.Slice(tensor.Batch, i, i+1)},
				comm.Message{Peer: m.Peer, View: b.v.Slice(tensor.Batch, i, i+1)})
		}
	}
	return out
}

// buffers is own as buffer 0, and workspace of that many rows for the others.
func (r *Ring) buffers(own kv, rows []int) []kv {
	out := []kv{own}
	for _, n := range rows[1:] {
		out = append(out, kv{r.like(own.k, n), r.like(own.v, n)})
	}
	return out
}

func (r *Ring) like(v View, rows int) View {
	return r.Arena.Alloc(v.DType(), v.Len(tensor.Batch), rows, v.Len(tensor.Heads), v.Len(tensor.Dim))
}
