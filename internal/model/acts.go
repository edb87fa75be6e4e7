package model

import (
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/tensor"
)

// acts holds the activations of one layer that its backward pass reads. Which of them live
// from the forward to the backward pass is a matter of Recompute.
type acts struct {
	mark tensor.Mark // below everything of this layer

	x        View // [B, S, 1, E], the layer's input
	inv1, n1 View // [B, S, 1, 1] and [B, S, 1, E], its norm

	// Where the heads of q and k are normalised, these are before that. Elsewhere they are q, k.
	qRaw, kRaw View
	qInv, kInv View              // [B, S, H, 1], [B, S, K, 1], of head norms
	q, k, v    View              // [B, S, H, D], [B, S, K, D], [B, S, K, D], rotated
	out        attention.Partial // [B, S, H, D] in the type of activations, and [B, S, H, 1]

	mlpMark     tensor.Mark // below what follows
	h           View        // [B, S, 1, E], x plus attention
	inv2, n2    View        // its norm
	gate, up, y View        // [B, S, 1, F]; y = silu(gate) * up
}

// extent says which activations alloc makes.
type extent int

const (
	forAttention extent = iota // what attention reads and writes
	everything
)

// keep makes a layer's output and what Recompute keeps of the layer, above a mark.
func (m *Model) keep(a *tensor.Arena, b Batch) (out View, s acts) {
	s.mark = a.Mark()
	out = m.hidden(a, b)
	switch m.opt.Recompute {
	case RecomputeFull:
	case RecomputeSelective:
		m.alloc(a, b, &s, forAttention)
	default:
		m.alloc(a, b, &s, everything)
	}
	return out, s
}

func (m *Model) move(hook func(int, []*View) error, layer int, s *acts) error {
	if hook == nil {
		return nil
	}
	saved := []*View{&s.x, &s.inv1, &s.n1, &s.qRaw, &s.kRaw, &s.qInv, &s.kInv, &s.v, &s.out.O, &s.out.LSE,
		&s.h, &s.inv2, &s.n2, &s.gate, &s.up, &s.y}
	same := s.q == s.qRaw
	if !same {
		saved = append(saved, &s.q, &s.k)
	}
	err := hook(layer, slices.DeleteFunc(saved, func(v *View) bool { return v.IsZero() }))
	if same {
		s.q, s.k = s.qRaw, s.kRaw
	}
	return err
}

// alloc makes the activations that s does not have yet. They are laid out in the order in
// which the backward pass is done with them, last first.
func (m *Model) alloc(a *tensor.Arena, b Batch, s *acts, e extent) {
	B, S := b.IDs.Len(tensor.Batch), b.IDs.Len(tensor.Seq)
	H, K, D := m.cfg.NumAttentionHeads, m.cfg.NumKeyValueHeads, m.cfg.HeadDim
	E, F := m.cfg.HiddenSize, m.cfg.IntermediateSize
	need := func(v *View, t tensor.DType, heads, dim int) {
		if v.IsZero() {
			*v = a.Alloc(t, B, S, heads, dim)
		}
	}

	// Of normalised q and k the raw ones are kept: to get back to them from the rotated ones
	// would take the projections again, the other way takes a norm and a rotation.
	need(&s.qRaw, m.dtype, H, D)
	need(&s.kRaw, m.dtype, K, D)
	need(&s.v, m.dtype, K, D)
	need(&s.out.O, m.dtype, H, D)
	need(&s.out.LSE, m.accum, H, 1)
	if e == forAttention {
		return
	}
	need(&s.inv1, m.accum, 1, 1)
	need(&s.n1, m.dtype, 1, E)
	if m.headNorm() {
		need(&s.qInv, m.accum, H, 1)
		need(&s.kInv, m.accum, K, 1)
		need(&s.q, m.dtype, H, D)
		need(&s.k, m.dtype, K, D)
	} else {
		s.q, s.k = s.qRaw, s.kRaw
	}

	if s.h.IsZero() {
		s.mlpMark = a.Mark()
	}
	need(&s.h, m.dtype, 1, E)
	need(&s.inv2, m.accum, 1, 1)
	need(&s.n2, m.dtype, 1, E)
	need(&s.gate, m.dtype, 1, F)
	need(&s.up, m.dtype, 1, F)
	need(&s.y, m.dtype, 1, F)
}

// headNorm reports whether the heads of q and k are normalised.
func (m *Model) headNorm() bool { return m.cfg.Family().HasHeadNorms() }
