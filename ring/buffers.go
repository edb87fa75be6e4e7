package ring

import (
	"context"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A kv holds rows of K and V, or of their gradients.
type kv struct{ k, v View }

func (x kv) rows(lo, hi int) kv {
	return kv{x.k.Slice(tensor.Seq, lo, hi), x.v.Slice(tensor.Seq, lo, hi)}
}

func (x kv) grads(lo, hi int) attention.KeyGrads {
	x = x.rows(lo, hi)
	return attention.KeyGrads{DK: x.k, DV: x.v}
}

func (b Block) of(bufs []kv) kv { return bufs[b.Buf].rows(b.Lo, b.Hi) }

// buffers of one pass are numbered as in hops.
type buffers struct {
	*Ring
	kv, grads []kv
	kernel    attention.Kernel // Ring.Kernel, or groupKernel
	schedule  *Schedule
	late      *arrival         // for which the first hop of the next pass waits; nil: none
	gated     comm.Pending     // for which the next call itself waits, by its gates; nil: none
	gates     []attention.Gate // of that call
}

// open allocates the workspace of a pass. own lists the rank's K and V, and in a backward pass their gradients.
func (r *Ring) open(s *Schedule, own ...kv) *buffers {
	b := &buffers{Ring: r, kernel: r.Kernel, schedule: s, kv: r.openAll(own[0], s.KVBufs)}
	if len(own) > 1 {
		b.grads = r.openAll(own[1], s.GradBufs)
	}
	if s.GatherHeads > 0 {
		n := own[0].k.Len(tensor.Heads)
		b.kernel = &groupKernel{Kernel: r.Kernel, kvHeads: n, groups: groups(s.GatherHeads, n)}
	}
	return b
}

func (r *Ring) openAll(own kv, list []Buffer) []kv {
	bufs := []kv{own}
	for _, x := range list[1:] {
		if x.Heads.Len() > 0 {
			bufs = append(bufs, r.openGroup(bufs, x))
		} else {
			bufs = append(bufs, kv{r.like(own.k, x.Rows), r.like(own.v, x.Rows)})
		}
	}
	return bufs
}

// openGroup returns a buffer of one group: part of the rank's own tensor, new workspace, or an earlier group's
// workspace.
func (r *Ring) openGroup(bufs []kv, x Buffer) kv {
	own := kv{someHeads(bufs[0].k, x.Heads), someHeads(bufs[0].v, x.Heads)}
	switch x.In {
	case 0:
		return own
	case len(bufs):
		return kv{r.like(own.k, x.Rows), r.like(own.v, x.Rows)}
	}
	return kv{narrow(bufs[x.In].k, x.Heads.Len()), narrow(bufs[x.In].v, x.Heads.Len())}
}

func someHeads(v View, h partition.Range) View { return v.Slice(tensor.Heads, h.Lo, h.Hi) }

// narrow returns dense workspace with fewer heads, in the memory of v.
func narrow(v View, heads int) View {
	shape := v.Shape()
	shape[tensor.Heads] = heads
	return tensor.Dense(v.Memory(), v.DType(), v.Offset(), shape)
}

func (r *Ring) like(v View, rows int) View {
	return r.Arena.Alloc(v.DType(), v.Len(tensor.Batch), rows, v.Len(tensor.Heads), v.Len(tensor.Dim))
}

// accumulator returns out, or out with workspace for O in the type of the LSE: rounding O at each hop would add up.
func (b *buffers) accumulator(out attention.Partial) attention.Partial {
	if t := out.LSE.DType(); out.O.DType() != t {
		out.O = b.alloc(t, out.O)
	}
	return out
}

// alloc returns workspace of the shape of v, with the heads of the largest group.
func (b *buffers) alloc(t tensor.DType, v View) View {
	shape := v.Shape()
	if n := b.schedule.GatherHeads; n > 0 {
		shape[tensor.Heads] = shape[tensor.Heads] / b.kv[0].k.Len(tensor.Heads) * n
	}
	return b.Arena.Alloc(t, shape[:]...)
}

// nothing is the transfer of a hop without messages.
type nothing struct{}

func (nothing) Wait()                      {}
func (nothing) Sync(context.Context) error { return nil }
