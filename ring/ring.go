package ring

import (
	"fmt"
	"path"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// Ring runs schedules on one rank. Kernel, Comm and Mover queue work on the compute Stream.
type Ring struct {
	Kernel attention.Kernel
	Comm   comm.Exchanger
	Mover  Mover // for schedules that copy rows or exchange heads
	Stream tensor.Stream
	Arena  *tensor.Arena // workspace, borrowed during a call; required
	Label  string        // prefix of labels in traces: "step 7/forward/layer 3"
}

// Forward sets out to the attention of the local queries over the keys of all ranks. It queues its work and returns. q:
// [batch, local queries, heads, dim]; k, v: [batch, local keys, kvHeads, dim], dense; out.O: as q, or an accumulator.
func (r *Ring) Forward(out attention.Partial, q, k, v View, s *Schedule, p attention.Softmax) error {
	if !r.plain(s, p) {
		return r.forwardAdapted(out, q, k, v, s, p)
	}
	defer r.Arena.Release(r.Arena.Mark()) // every transfer has been waited for by then
	b := r.open(s, kv{k, v})
	acc := b.accumulator(out)
	var pass attention.ForwardPass
	for i := range s.Forward {
		hop := &s.Forward[i]
		moving, err := b.exchange(hop)
		if err == nil && hop.Begins {
			pass, err = b.kernel.Forward(out.O, acc, q, p)
		}
		if err == nil && len(hop.Tiles) > 0 {
			err = pass.Block(b.block(hop))
		}
		if err == nil && hop.Ends {
			err = pass.End()
		}
		if err != nil {
			return fmt.Errorf("forward %s: %w", hop.Label, err)
		}
		b.await(hop, moving) // on the stream: the host goes on
	}
	r.Stream.Label(r.Label)
	return nil
}

// Backward sets g to the gradients, given do, the gradient of out.O, and out, the result of the whole forward pass.
func (r *Ring) Backward(g attention.Grads, do, q, k, v View, out attention.Partial, s *Schedule,
	p attention.Softmax) error {
	if !r.plain(s, p) {
		return r.backwardAdapted(g, do, q, k, v, out, s, p)
	}
	defer r.Arena.Release(r.Arena.Mark())
	b := r.open(s, kv{k, v}, kv{g.DK, g.DV})
	saved := attention.Saved{O: out.O, LSE: out.LSE, Delta: b.alloc(out.LSE.DType(), out.LSE)}
	var pass attention.BackwardPass
	for i := range s.Backward {
		hop := &s.Backward[i]
		moving, err := b.exchange(hop)
		if err == nil && hop.Begins {
			pass, err = b.kernel.Backward(g.DQ, do, q, saved, p)
		}
		if err == nil && hop.Grads.Hi > 0 { // also without tiles: it zeroes the rank's own gradients
			err = pass.Block(b.gradBlock(hop))
		}
		if err == nil && hop.Ends {
			err = pass.End() // beside the gradients on their way home
		}
		if err != nil {
			return fmt.Errorf("backward %s: %w", hop.Label, err)
		}
		b.await(hop, moving)
		for _, f := range hop.Fold {
			if err := pass.Fold(b.fold(f)); err != nil {
				return fmt.Errorf("backward %s: %w", hop.Label, err)
			}
		}
	}
	r.Stream.Label(r.Label)
	return nil
}

// exchange labels the stream with a hop and begins its transfers.
func (b *buffers) exchange(hop *Hop) (moving comm.Pending, err error) {
	b.Stream.Label(path.Join(b.Label, hop.Label))
	send := messages(messages(nil, b.kv, hop.SendKV), b.grads, hop.SendGrad)
	recv := messages(messages(nil, b.kv, hop.RecvKV), b.grads, hop.RecvGrad)
	if moving = (nothing{}); len(send)+len(recv) > 0 {
		moving, err = b.Comm.Exchange(send, recv)
	}
	if err == nil {
		err = b.copyRows(hop)
	}
	return moving, err
}

// messages appends K, then V, of each batch element: rows of several elements are not dense.
func messages(list []comm.Message, bufs []kv, moves []Move) []comm.Message {
	for _, m := range moves {
		x := m.Block.of(bufs)
		for i := range x.k.Len(tensor.Batch) {
			list = append(list, comm.Message{Peer: m.Peer, View: x.k.Slice(tensor.Batch, i, i+1)},
				comm.Message{Peer: m.Peer, View: x.v.Slice(tensor.Batch, i, i+1)})
		}
	}
	return list
}

func (b *buffers) block(hop *Hop) attention.Block {
	x := hop.Keys.of(b.kv)
	return attention.Block{K: x.k, V: x.v, Tiles: hop.Tiles, Columns: hop.Columns, Gates: b.gates,
		First: hop.First, Last: hop.Last}
}

func (b *buffers) gradBlock(hop *Hop) attention.GradBlock {
	grads := b.grads[hop.Grads.Buf].grads(0, max(hop.Keys.Hi, hop.Grads.Hi))
	return attention.GradBlock{Block: b.block(hop), KeyGrads: grads, Fresh: hop.fresh(),
		FoldNext: len(hop.Fold) > 0 && hop.Fold[0].Dst.Buf == hop.Grads.Buf}
}

func (b *buffers) fold(f Fold) attention.Fold {
	dst, src := b.grads[f.Dst.Buf].grads(0, f.Dst.Hi), b.grads[f.Src.Buf].grads(f.Src.Lo, f.Src.Hi)
	return attention.Fold{Dst: dst, Lo: f.Dst.Lo, Src: src}
}
