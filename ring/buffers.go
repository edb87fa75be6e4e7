package ring

import (
	"context"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// kv is a buffer of keys and values, or of their gradients.
type kv struct{ k, v View }

func (b kv) rows(lo, hi int) kv {
	return kv{b.k.Slice(tensor.Seq, lo, hi), b.v.Slice(tensor.Seq, lo, hi)}
}

// block is a call of a forward hop.
func (m *keys) block(c *Part, bufs []kv) attention.Block {
	b := bufs[c.Keys.Buf].rows(0, c.Keys.Hi)
	return attention.Block{K: b.k, V: b.v, Tiles: c.Tiles, Columns: m.at.of(c.From), Gates: m.gates, First: c.First, Last: c.Last}
}

// gradBlock is a call of a backward hop. Its gradients have the rows that others summed, too,
// which may be more than it has keys.
func (m *keys) gradBlock(c *Part, bufs, grads []kv, foldNext bool) attention.GradBlock {
	return attention.GradBlock{
		Block: m.block(c, bufs), KeyGrads: grads[c.Grads.Buf].grads(max(c.Keys.Hi, c.Grads.Hi)),
		Fresh: partition.Range{Lo: c.Grads.Lo, Hi: c.Grads.Hi}, FoldNext: foldNext,
	}
}

// of is the fold of rows of these buffers.
func (f *Fold) of(grads []kv) attention.Fold {
	src := f.Src.of(grads)
	return attention.Fold{Dst: grads[f.Dst.Buf].grads(f.Dst.Hi), Lo: f.Dst.Lo, Src: attention.KeyGrads{DK: src.k, DV: src.v}}
}

// grads is the first n rows, as gradients.
func (b kv) grads(n int) attention.KeyGrads {
	x := b.rows(0, n)
	return attention.KeyGrads{DK: x.k, DV: x.v}
}

// of is the rows of a block.
func (b Block) of(bufs []kv) kv { return bufs[b.Buf].rows(b.Lo, b.Hi) }

// messages appends the views of moves to and from others: K then V of each batch element, since rows of
// one element are dense and rows of several are not.
func (m *keys) messages(out []comm.Message, moves []Move, bufs []kv) []comm.Message {
	for _, move := range moves {
		if move.Peer == m.rank {
			continue
		}
		b := move.Block.of(bufs)
		for i := range b.k.Len(tensor.Batch) {
			out = append(out,
				comm.Message{Peer: move.Peer, View: b.k.Slice(tensor.Batch, i, i+1)},
				comm.Message{Peer: move.Peer, View: b.v.Slice(tensor.Batch, i, i+1)})
		}
	}
	return out
}

// exchange begins a transfer, if there is anything to move.
func (r *Ring) exchange(send, recv []comm.Message) (comm.Pending, error) {
	if len(send)+len(recv) == 0 {
		return nothing{}, nil
	}
	return r.Comm.Exchange(send, recv)
}

// nothing is a transfer of nothing.
type nothing struct{}

func (nothing) Wait()                      {}
func (nothing) Sync(context.Context) error { return nil }

// buffers is own as buffer 0, and workspace of that many rows for the others.
func (r *Ring) buffers(own kv, rows []int) []kv {
	out := []kv{own}
	for _, n := range rows[1:] {
		out = append(out, kv{r.like(own.k, n), r.like(own.v, n)})
	}
	return out
}

// accumulator is out itself, or out with room for O in the type that is accumulated in.
func (r *Ring) accumulator(out attention.Partial) attention.Partial {
	if t := out.LSE.DType(); out.O.DType() != t {
		out.O = r.alloc(t, out.O)
	}
	return out
}

// alloc is workspace of that type and the shape of v.
func (r *Ring) alloc(t tensor.DType, v View) View {
	shape := v.Shape()
	return r.Arena.Alloc(t, shape[:]...)
}

func (r *Ring) like(v View, rows int) View {
	return r.Arena.Alloc(v.DType(), v.Len(tensor.Batch), rows, v.Len(tensor.Heads), v.Len(tensor.Dim))
}
