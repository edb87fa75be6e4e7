package model

import (
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// layerForward sets out to layer i of s.x and fills s:
//
//	h   = x + Wo attention(rope(Wq n1), rope(Wk n1), Wv n1),  n1 = norm(x)
//	out = h + Wdown (silu(Wgate n2) * Wup n2),                n2 = norm(h)
func (m *Model) layerForward(i int, b Batch, out View, s *activations) error {
	l := &m.layers[i]
	m.projectForward(l, s)
	m.rotateForward(l, b, s)
	if err := m.att.Forward(i, s.out, s.q, s.k, s.v); err != nil {
		return err
	}
	m.mixForward(l, s)
	m.mlpForward(l, s)
	m.ops.Linear(out, s.y, l[hf.Down].w, s.h)
	return nil
}

// recompute computes the activations that were not kept. It repeats the calls of the forward pass on the same inputs,
// so the bits are the same.
func (m *Model) recompute(a *tensor.Arena, i int, b Batch, s *activations) error {
	l := &m.layers[i]
	switch m.opt.Recompute {
	case RecomputeFull:
		m.alloc(a, b, s, everything)
		m.projectForward(l, s)
		m.rotateForward(l, b, s)
		if err := m.att.Forward(i, s.out, s.q, s.k, s.v); err != nil {
			return err
		}
	case RecomputeSelective:
		m.alloc(a, b, s, everything)
		m.ops.RMSNorm(s.n1, s.inv1, s.x, l[hf.InputNorm].w, m.cfg.RMSNormEps)
		if m.headNorm() {
			m.rotateForward(l, b, s)
		}
	default:
		return nil
	}
	m.mixForward(l, s)
	m.mlpForward(l, s)
	return nil
}

// layerBackward replaces d, the gradient of the layer's output, by the gradient of its input, and adds to the gradients
// of its parameters. It overwrites s.
func (m *Model) layerBackward(a *tensor.Arena, i int, b Batch, d View, s *activations) error {
	if err := m.recompute(a, i, b, s); err != nil {
		return err
	}
	l := &m.layers[i]
	m.mlpBackward(l, d, s)
	a.Release(s.mlpMark)

	do := a.Alloc(m.dtype, shape(s.out.O)...)
	m.mixBackward(l, do, d, s)
	g := attention.Grads{
		DQ: a.Alloc(m.accum, shape(s.q)...),
		DK: a.Alloc(m.accum, shape(s.k)...),
		DV: a.Alloc(m.accum, shape(s.v)...),
	}
	if err := m.att.Backward(i, g, do, s.q, s.k, s.v, s.out); err != nil {
		return err
	}
	dq, dk, dv := m.asCompute(a, g.DQ), m.asCompute(a, g.DK), m.asCompute(a, g.DV)
	m.ops.NormRopeBackward(dq, l[hf.QueryNorm].g, g.DQ, s.qRaw, s.qInv, l[hf.QueryNorm].w, b.Cos, b.Sin)
	m.ops.NormRopeBackward(dk, l[hf.KeyNorm].g, g.DK, s.kRaw, s.kInv, l[hf.KeyNorm].w, b.Cos, b.Sin)
	if dv != g.DV {
		m.ops.Copy(dv, g.DV)
	}
	m.projectBackward(l, d, dq, dk, dv, s)
	return nil
}

// projectForward sets n1 = norm(x), and its three projections.
func (m *Model) projectForward(l *layer, s *activations) {
	m.ops.RMSNorm(s.n1, s.inv1, s.x, l[hf.InputNorm].w, m.cfg.RMSNormEps)
	m.ops.Linear(s.qRaw, s.n1, l[hf.Query].w, View{})
	m.ops.Linear(s.kRaw, s.n1, l[hf.Key].w, View{})
	m.ops.Linear(s.v, s.n1, l[hf.Value].w, View{})
}

func (m *Model) projectBackward(l *layer, d, dq, dk, dv View, s *activations) {
	m.ops.LinearDW(l[hf.Query].g, dq, s.n1)
	m.ops.LinearDW(l[hf.Key].g, dk, s.n1)
	m.ops.LinearDW(l[hf.Value].g, dv, s.n1)
	dn1 := s.n1 // no longer needed
	m.ops.LinearDX(dn1, dq, l[hf.Query].w, false)
	m.ops.LinearDX(dn1, dk, l[hf.Key].w, true)
	m.ops.LinearDX(dn1, dv, l[hf.Value].w, true)
	m.ops.RMSNormBackward(d, l[hf.InputNorm].g, dn1, s.x, s.inv1, l[hf.InputNorm].w, true)
}

// rotateForward sets q = rope(norm(qRaw)), and k likewise; without head norms in place.
func (m *Model) rotateForward(l *layer, b Batch, s *activations) {
	m.ops.NormRope(s.q, s.qInv, s.qRaw, l[hf.QueryNorm].w, b.Cos, b.Sin, m.cfg.RMSNormEps)
	m.ops.NormRope(s.k, s.kInv, s.kRaw, l[hf.KeyNorm].w, b.Cos, b.Sin, m.cfg.RMSNormEps)
}

// mixForward sets h = x + Wo o, n2 = norm(h).
func (m *Model) mixForward(l *layer, s *activations) {
	m.ops.Linear(s.h, s.out.O, l[hf.Output].w, View{})
	m.ops.AddRMSNorm(s.n2, s.inv2, s.h, s.h, s.x, l[hf.PostNorm].w, m.cfg.RMSNormEps)
}

// mixBackward sets do. d is the gradient of h and, since h = x + ..., the first part of the gradient of x.
func (m *Model) mixBackward(l *layer, do, d View, s *activations) {
	m.ops.LinearDW(l[hf.Output].g, d, s.out.O)
	m.ops.LinearDX(do, d, l[hf.Output].w, false)
}

// mlpForward sets y = silu(Wgate n2) * Wup n2. The last product is the layer's output, which the backward pass does not
// need.
func (m *Model) mlpForward(l *layer, s *activations) {
	m.ops.Linear(s.gate, s.n2, l[hf.Gate].w, View{})
	m.ops.Linear(s.up, s.n2, l[hf.Up].w, View{})
	m.ops.SwiGLU(s.y, s.gate, s.up)
}

// mlpBackward replaces d, the gradient of out, by the gradient of h. Gradients reuse the memory of activations that are
// no longer needed.
func (m *Model) mlpBackward(l *layer, d View, s *activations) {
	m.ops.LinearDW(l[hf.Down].g, d, s.y)
	dy := s.y
	m.ops.LinearDX(dy, d, l[hf.Down].w, false)

	dgate, dup := s.gate, s.up
	m.ops.SwiGLUBackward(dgate, dup, dy, s.gate, s.up)

	m.ops.LinearDW(l[hf.Gate].g, dgate, s.n2)
	m.ops.LinearDW(l[hf.Up].g, dup, s.n2)
	dn2 := s.n2
	m.ops.LinearDX(dn2, dgate, l[hf.Gate].w, false)
	m.ops.LinearDX(dn2, dup, l[hf.Up].w, true)
	m.ops.RMSNormBackward(d, l[hf.PostNorm].g, dn2, s.h, s.inv2, l[hf.PostNorm].w, true)
}

// asCompute returns v if it has the type of activations, else a new view of that type.
func (m *Model) asCompute(a *tensor.Arena, v View) View {
	if v.DType() == m.dtype {
		return v
	}
	return a.Alloc(m.dtype, shape(v)...)
}

func shape(v View) []int {
	s := v.Shape()
	return s[:]
}

// activations are the tensors of one layer for its backward pass. Recompute selects those kept from the forward pass.
type activations struct {
	mark tensor.Mark // start of this layer in the arena

	x        View // [B, S, 1, E], the layer's input
	inv1, n1 View // [B, S, 1, 1] and [B, S, 1, E], its norm

	// With head norms, qRaw and kRaw are the inputs of the norms; else they are q and k.
	qRaw, kRaw View
	qInv, kInv View              // [B, S, H, 1], [B, S, K, 1], of head norms
	q, k, v    View              // [B, S, H, D], [B, S, K, D], [B, S, K, D], rotated
	out        attention.Partial // [B, S, H, D] in the type of activations, and [B, S, H, 1]

	mlpMark     tensor.Mark // start of the following views
	h           View        // [B, S, 1, E], x plus attention
	inv2, n2    View        // its norm
	gate, up, y View        // [B, S, 1, F]; y = silu(gate) * up
}

// An extent selects the activations that alloc makes.
type extent int

const (
	forAttention extent = iota // inputs and outputs of attention
	everything
)

// keep allocates a layer's output and the activations kept by Recompute, above a mark.
func (m *Model) keep(a *tensor.Arena, b Batch) (out View, s activations) {
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

func (m *Model) runHook(hook func(int, []*View) error, layer int, s *activations) error {
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

// alloc allocates the missing activations of s, in the reverse order of their last use in the backward pass.
func (m *Model) alloc(a *tensor.Arena, b Batch, s *activations, e extent) {
	B, S := b.IDs.Len(tensor.Batch), b.IDs.Len(tensor.Seq)
	H, K, D := m.cfg.NumAttentionHeads, m.cfg.NumKeyValueHeads, m.cfg.HeadDim
	E, F := m.cfg.HiddenSize, m.cfg.IntermediateSize
	need := func(v *View, t tensor.DType, heads, dim int) {
		if v.IsZero() {
			*v = a.Alloc(t, B, S, heads, dim)
		}
	}

	// With head norms the raw q and k are kept: recomputing them takes projections, recomputing the rotated ones only a
	// norm and a rotation.
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

// headNorm reports whether query and key heads have a norm.
func (m *Model) headNorm() bool { return m.cfg.Family().HasHeadNorms() }
