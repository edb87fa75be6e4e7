package model

import (
	"iter"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// tileRows is the number of tokens whose row-wise activations exist at once, unless the layer keeps them. Longer matrix
// products are no faster.
const tileRows = 16384

// layerForward sets out to layer i of kept.x, and the views of kept:
//
//	h   = x + Wo attention(rope(Wq n1), rope(Wk n1), Wv n1),  n1 = norm(x)
//	out = h + Wdown (silu(Wgate n2) * Wup n2),                n2 = norm(h)
func (m *Model) layerForward(a *tensor.Arena, i int, b Batch, out View, kept activations) error {
	defer a.Release(a.Mark())
	l, s := &m.layers[i], kept
	if err := m.attend(a, i, b, &s, false); err != nil {
		return err
	}
	m.allocMLP(a, &s, m.tileShape(s.x))
	for lo, hi := range m.tiles(s.x) {
		t := s.tile(lo, hi)
		m.mixForward(l, &t)
		m.mlpForward(l, &t)
		m.ops.Linear(part(out, lo, hi), t.y, l[hf.Down].w, t.h)
	}
	return nil
}

// attend sets q, k and v, and computes attention unless its output is known.
func (m *Model) attend(a *tensor.Arena, i int, b Batch, s *activations, known bool) error {
	l := &m.layers[i]
	m.allocAttention(a, s)
	mark, rows := a.Mark(), *s
	m.allocNorm(a, &rows, m.tileShape(s.x))
	for lo, hi := range m.tiles(s.x) {
		t := rows.tile(lo, hi)
		m.projectForward(l, &t)
	}
	a.Release(mark)
	m.rotateForward(l, b, s)
	if known {
		return nil
	}
	return m.att.Forward(i, s.out, s.q, s.k, s.v)
}

// layerBackward replaces d, the gradient of the layer's output, by the gradient of its input, and adds to the gradients
// of its parameters. It overwrites s. It computes the missing activations by the calls of the forward pass on the same
// inputs, so the bits are the same.
func (m *Model) layerBackward(a *tensor.Arena, i int, b Batch, d View, s activations) error {
	l, all := &m.layers[i], !s.y.IsZero()
	if !all {
		if err := m.attend(a, i, b, &s, !s.out.O.IsZero()); err != nil {
			return err
		}
	}
	do := a.Alloc(m.dtype, shape(s.out.O)...)
	mark := a.Mark()
	m.mixBackward(a, l, do, d, s)
	a.Release(mark)

	g := attention.Grads{
		DQ: a.Alloc(m.accum, shape(s.q)...),
		DK: a.Alloc(m.accum, shape(s.k)...),
		DV: a.Alloc(m.accum, shape(s.v)...),
	}
	if err := m.att.Backward(i, g, do, s.q, s.k, s.v, s.out); err != nil {
		return err
	}
	dq, dk, dv := do, s.k, s.v // no longer needed
	qRaw, kRaw := s.raw()
	m.ops.NormRopeBackward(dq, l[hf.QueryNorm].g, g.DQ, qRaw, s.qInv, l[hf.QueryNorm].w, b.Cos, b.Sin)
	m.ops.NormRopeBackward(dk, l[hf.KeyNorm].g, g.DK, kRaw, s.kInv, l[hf.KeyNorm].w, b.Cos, b.Sin)
	m.ops.Copy(dv, g.DV)
	a.Release(mark)

	m.allocNorm(a, &s, m.tileShape(s.x))
	for lo, hi := range m.tiles(s.x) {
		t := s.tile(lo, hi)
		if !all {
			m.ops.RMSNorm(t.n1, t.inv1, t.x, l[hf.InputNorm].w, m.cfg.RMSNormEps)
		}
		m.projectBackward(l, part(d, lo, hi), part(dq, lo, hi), part(dk, lo, hi), part(dv, lo, hi), &t)
	}
	return nil
}

// projectForward sets n1 = norm(x), and its three projections.
func (m *Model) projectForward(l *layer, s *activations) {
	m.ops.RMSNorm(s.n1, s.inv1, s.x, l[hf.InputNorm].w, m.cfg.RMSNormEps)
	q, k := s.raw()
	m.ops.Linear(q, s.n1, l[hf.Query].w, View{})
	m.ops.Linear(k, s.n1, l[hf.Key].w, View{})
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
	q, k := s.raw()
	m.ops.NormRope(s.q, s.qInv, q, l[hf.QueryNorm].w, b.Cos, b.Sin, m.cfg.RMSNormEps)
	m.ops.NormRope(s.k, s.kInv, k, l[hf.KeyNorm].w, b.Cos, b.Sin, m.cfg.RMSNormEps)
}

// mixForward sets h = x + Wo o, n2 = norm(h).
func (m *Model) mixForward(l *layer, s *activations) {
	m.ops.Linear(s.h, s.out.O, l[hf.Output].w, View{})
	m.ops.AddRMSNorm(s.n2, s.inv2, s.h, s.h, s.x, l[hf.PostNorm].w, m.cfg.RMSNormEps)
}

// mixBackward sets do, and replaces d, the gradient of the layer's output, by the gradient of h. Since h = x + ...,
// that is the first part of the gradient of x.
func (m *Model) mixBackward(a *tensor.Arena, l *layer, do, d View, s activations) {
	all := !s.y.IsZero()
	m.allocMLP(a, &s, m.tileShape(s.x))
	for lo, hi := range m.tiles(s.x) {
		t, d := s.tile(lo, hi), part(d, lo, hi)
		if !all {
			m.mixForward(l, &t)
			m.mlpForward(l, &t)
		}
		m.mlpBackward(l, d, &t)
		m.ops.LinearDW(l[hf.Output].g, d, t.out.O)
		m.ops.LinearDX(part(do, lo, hi), d, l[hf.Output].w, false)
	}
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

func shape(v View) []int {
	s := v.Shape()
	return s[:]
}

// activations are the tensors of one layer for its backward pass. Save selects those kept from the forward pass. Others
// are zero until they are computed again.
type activations struct {
	mark tensor.Mark // start of this layer in the arena

	x   View              // [B, S, 1, E], the layer's input
	out attention.Partial // [B, S, H, D] in the type of activations, and [B, S, H, 1]

	q, k, v    View // [B, S, H, D], [B, S, K, D], [B, S, K, D], rotated
	qRaw, kRaw View // with head norms, the inputs of these; else zero
	qInv, kInv View // [B, S, H, 1], [B, S, K, 1], of head norms

	// Computed row by row: all tokens or one tile.
	inv1, n1    View // [B, S, 1, 1] and [B, S, 1, E], the norm of x
	h           View // [B, S, 1, E], x plus attention
	inv2, n2    View // its norm
	gate, up, y View // [B, S, 1, F]; y = silu(gate) * up
}

// views lists the views, those of SaveInput and SaveOutput first.
func (s *activations) views() []*View {
	return []*View{&s.x, &s.out.O, &s.out.LSE, &s.q, &s.k, &s.v, &s.qRaw, &s.kRaw, &s.qInv, &s.kInv,
		&s.inv1, &s.n1, &s.h, &s.inv2, &s.n2, &s.gate, &s.up, &s.y}
}

// move calls a hook with the kept views.
func (s *activations) move(hook func(int, []*View) error, layer int) error {
	if hook == nil {
		return nil
	}
	return hook(layer, slices.DeleteFunc(s.views(), func(v *View) bool { return v.IsZero() }))
}

// raw returns the projections before norm and rotation; without head norms the memory of the rotated ones.
func (s *activations) raw() (q, k View) {
	if s.qRaw.IsZero() {
		return s.q, s.k
	}
	return s.qRaw, s.kRaw
}

// tile returns the activations of the tokens from lo to hi.
func (s *activations) tile(lo, hi int) activations {
	t, all := *s, s.x.Rows()
	for _, v := range t.views() {
		switch {
		case v.IsZero():
		case v.Rows() == all:
			*v = part(*v, lo, hi)
		default:
			*v = part(*v, 0, hi-lo)
		}
	}
	return t
}

// part returns the tokens of v from lo to hi, [1, hi-lo, 1, dim].
func part(v View, lo, hi int) View { return rows(v).Slice(tensor.Seq, lo, hi) }

// tiles returns the ranges of tokens, lo and hi, that are computed at a time.
func (m *Model) tiles(x View) iter.Seq2[int, int] {
	return func(yield func(int, int) bool) {
		for lo, n := 0, x.Rows(); lo < n; lo += m.opt.tile {
			if !yield(lo, min(lo+m.opt.tile, n)) || m.dryRun {
				return // the others of a plan are no larger
			}
		}
	}
}

// tileShape returns the batch and the tokens of a tile of x: all, if they fit.
func (m *Model) tileShape(x View) [2]int {
	if n := m.opt.tile; n < x.Rows() {
		return [2]int{1, n}
	}
	return [2]int{x.Len(tensor.Batch), x.Len(tensor.Seq)}
}

// keep allocates the activations that a layer with the input s.x keeps.
func (m *Model) keep(a *tensor.Arena, s *activations, save Save) {
	switch save {
	case SaveAll:
		all := [2]int{s.x.Len(tensor.Batch), s.x.Len(tensor.Seq)}
		m.allocAttention(a, s)
		m.allocNorm(a, s, all)
		m.allocMLP(a, s, all)
	case SaveOutput:
		m.allocOutput(a, s)
	}
}

// alloc allocates a missing view for tokens, [batch, seq].
func alloc(a *tensor.Arena, v *View, t tensor.DType, tokens [2]int, heads, dim int) {
	if v.IsZero() {
		*v = a.Alloc(t, tokens[0], tokens[1], heads, dim)
	}
}

func (m *Model) allocOutput(a *tensor.Arena, s *activations) {
	all, H := [2]int{s.x.Len(tensor.Batch), s.x.Len(tensor.Seq)}, m.cfg.NumAttentionHeads
	alloc(a, &s.out.O, m.dtype, all, H, m.cfg.HeadDim)
	alloc(a, &s.out.LSE, m.accum, all, H, 1)
}

// allocAttention allocates the inputs and outputs of attention.
func (m *Model) allocAttention(a *tensor.Arena, s *activations) {
	all := [2]int{s.x.Len(tensor.Batch), s.x.Len(tensor.Seq)}
	H, K, D := m.cfg.NumAttentionHeads, m.cfg.NumKeyValueHeads, m.cfg.HeadDim
	m.allocOutput(a, s)
	alloc(a, &s.q, m.dtype, all, H, D)
	alloc(a, &s.k, m.dtype, all, K, D)
	alloc(a, &s.v, m.dtype, all, K, D)
	if m.headNorm() {
		alloc(a, &s.qRaw, m.dtype, all, H, D)
		alloc(a, &s.kRaw, m.dtype, all, K, D)
		alloc(a, &s.qInv, m.accum, all, H, 1)
		alloc(a, &s.kInv, m.accum, all, K, 1)
	}
}

func (m *Model) allocNorm(a *tensor.Arena, s *activations, tokens [2]int) {
	alloc(a, &s.inv1, m.accum, tokens, 1, 1)
	alloc(a, &s.n1, m.dtype, tokens, 1, m.cfg.HiddenSize)
}

func (m *Model) allocMLP(a *tensor.Arena, s *activations, tokens [2]int) {
	alloc(a, &s.h, m.dtype, tokens, 1, m.cfg.HiddenSize)
	alloc(a, &s.inv2, m.accum, tokens, 1, 1)
	alloc(a, &s.n2, m.dtype, tokens, 1, m.cfg.HiddenSize)
	for _, v := range []*View{&s.gate, &s.up, &s.y} {
		alloc(a, v, m.dtype, tokens, 1, m.cfg.IntermediateSize)
	}
}

// headNorm reports whether query and key heads have a norm.
func (m *Model) headNorm() bool { return m.cfg.Family().HasHeadNorms() }
