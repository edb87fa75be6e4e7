package ring

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/tensor"
)

// kv is a buffer of keys and values, or of their gradients.
type kv struct{ k, v View }

func (b kv) rows(lo, hi int) kv {
	return kv{b.k.Slice(tensor.Seq, lo, hi), b.v.Slice(tensor.Seq, lo, hi)}
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
