package model

import (
	"iter"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// tileRows is the number of tokens whose row-wise activations exist at once, unless the layer keeps them. Longer matrix
// products are no faster.
const tileRows = 16384

// layerForward sets out to layer i of kept.x, and the views of kept. If it runs again, it leaves out attention with a
// kept output.
//
//	h   = x + Wo attention(rope(Wq n1), rope(Wk n1), Wv n1),  n1 = norm(x)
//	out = h + Wdown (act(Wgate n2) * Wup n2),                 n2 = norm(h)
//
// With norms of branches, both summands are normalised first.
func (m *Model) layerForward(a *tensor.Arena, i int, b Batch, out View, kept activations, again bool) error {
	defer a.Release(a.Mark())
	l, s := &m.layers[i], kept
	if !again || s.out.O.IsZero() {
		if err := m.attend(a, i, b, &s, false); err != nil {
			return err
		}
	}
	m.allocTile(a, &s, untilNorm, untilAll)
	for lo, hi := range m.tiles(s.x) {
		t := s.tile(lo, hi)
		to := part(out, lo, hi)
		m.mlpForward(l, &t, to)
		if t.down.IsZero() {
			m.project(l, hf.Down, to, t.y, t.h)
		} else {
			m.ops.Add(to, t.h)
		}
	}
	return nil
}

// attend sets q, k and v, and computes attention unless its output is known:
//
//	q = rope(norm(qRaw)), qRaw = Wq n1; k likewise; without head norms in place
func (m *Model) attend(a *tensor.Arena, i int, b Batch, s *activations, known bool) error {
	l, eps := &m.layers[i], m.cfg.RMSNormEps
	m.alloc(a, s, untilInput, untilAttention, b.IDs.Len(tensor.Batch), b.IDs.Len(tensor.Seq))
	mark, rows := a.Mark(), *s
	m.allocTile(a, &rows, untilAttention, untilNorm)
	for lo, hi := range m.tiles(s.x) {
		t := rows.tile(lo, hi)
		q, k := t.raw()
		m.ops.RMSNorm(t.n1, t.inv1, t.x, l[hf.InputNorm].w, eps)
		m.project(l, hf.Query, q, t.n1, View{})
		m.project(l, hf.Key, k, t.n1, View{})
		m.project(l, hf.Value, t.v, t.n1, View{})
	}
	a.Release(mark)
	q, k := s.raw()
	cos, sin := m.angles(b, i)
	m.ops.NormRope(s.q, s.qInv, q, l[hf.QueryNorm].w, cos, sin, eps)
	m.ops.NormRope(s.k, s.kInv, k, l[hf.KeyNorm].w, cos, sin, eps)
	if known {
		return nil
	}
	return m.att.Forward(i, s.out, s.q, s.k, s.v)
}

// angles returns the rotary tables of a layer: zero Views if it does not rotate.
func (m *Model) angles(b Batch, layer int) (cos, sin View) {
	rope := m.cfg.Layer(layer).Rope
	if rope < 0 {
		return View{}, View{}
	}
	n := b.IDs.Len(tensor.Batch)
	lo := b.Cos.Len(tensor.Batch) / m.cfg.Ropes() * rope
	return b.Cos.Slice(tensor.Batch, lo, lo+n), b.Sin.Slice(tensor.Batch, lo, lo+n)
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
	mark, rows := a.Mark(), s
	m.allocTile(a, &rows, untilNorm, untilAll)
	var branch View
	if !all && !rows.down.IsZero() {
		branch = a.Alloc(m.dtype, shape(rows.down)...)
	}
	for lo, hi := range m.tiles(s.x) {
		t, d := rows.tile(lo, hi), part(d, lo, hi)
		if !all {
			m.mlpForward(l, &t, branch)
		}
		m.mlpBackward(l, d, &t)
		if !t.proj.IsZero() {
			m.ops.RMSNormBackward(t.proj, l[hf.AttentionNorm].g, d, t.proj, t.projInv, l[hf.AttentionNorm].w, false)
			d = t.proj
		}
		m.projectDW(l, hf.Output, d, t.out.O)
		m.linearDX(part(do, lo, hi), d, &l[hf.Output], false)
	}
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
	cos, sin := m.angles(b, i)
	m.ops.NormRopeBackward(dq, l[hf.QueryNorm].g, g.DQ, qRaw, s.qInv, l[hf.QueryNorm].w, cos, sin)
	m.ops.NormRopeBackward(dk, l[hf.KeyNorm].g, g.DK, kRaw, s.kInv, l[hf.KeyNorm].w, cos, sin)
	m.ops.Copy(dv, g.DV)
	a.Release(mark)

	m.allocTile(a, &s, untilAttention, untilNorm)
	for lo, hi := range m.tiles(s.x) {
		t := s.tile(lo, hi)
		if !all {
			m.ops.RMSNorm(t.n1, t.inv1, t.x, l[hf.InputNorm].w, m.cfg.RMSNormEps)
		}
		m.projectBackward(l, part(d, lo, hi), part(dq, lo, hi), part(dk, lo, hi), part(dv, lo, hi), &t, i > m.lowest)
	}
	return nil
}

// project sets y to the projection of x of a role, with its bias, plus add unless that is the zero View.
func (m *Model) project(l *layer, r hf.Role, y, x, add View) {
	if bias := l[r.Bias()].w; !bias.IsZero() { // y begins as the bias of every row
		n := y.Cols()
		m.ops.Copy(y, tensor.NewView(bias.Memory(), bias.DType(), bias.Offset(), [4]int{1, y.Rows(), 1, n},
			[4]int64{0, 0, 0, 1}))
		if !add.IsZero() {
			m.ops.Add(y, add)
		}
		add = y
	}
	m.linear(y, x, &l[r], add)
}

// projectDW adds to the gradients of a projection's weight and bias.
func (m *Model) projectDW(l *layer, r hf.Role, dy, x View) {
	m.linearDW(&l[r], dy, x)
	if bias := l[r.Bias()].g; !bias.IsZero() {
		m.ops.SumRows(bias, dy)
	}
}

// projectBackward needs no gradient of the norm's input if no parameter below is trained.
func (m *Model) projectBackward(l *layer, d, dq, dk, dv View, s *activations, below bool) {
	m.projectDW(l, hf.Query, dq, s.n1)
	m.projectDW(l, hf.Key, dk, s.n1)
	m.projectDW(l, hf.Value, dv, s.n1)
	if !below && l[hf.InputNorm].frozen {
		return
	}
	dn1 := s.n1 // no longer needed
	m.linearDX(dn1, dq, &l[hf.Query], false)
	m.linearDX(dn1, dk, &l[hf.Key], true)
	m.linearDX(dn1, dv, &l[hf.Value], true)
	m.ops.RMSNormBackward(d, l[hf.InputNorm].g, dn1, s.x, s.inv1, l[hf.InputNorm].w, true)
}

// mlpForward sets y. With a norm of the product with Wdown, it sets branch to that norm.
//
//	y = act(Wgate n2) * Wup n2,  n2 = norm(h),  h = x + Wo o
func (m *Model) mlpForward(l *layer, s *activations, branch View) {
	if s.proj.IsZero() {
		m.project(l, hf.Output, s.h, s.out.O, View{})
	} else {
		m.project(l, hf.Output, s.proj, s.out.O, View{})
		m.ops.RMSNorm(s.h, s.projInv, s.proj, l[hf.AttentionNorm].w, m.cfg.RMSNormEps)
	}
	m.ops.AddRMSNorm(s.n2, s.inv2, s.h, s.h, s.x, l[hf.PostNorm].w, m.cfg.RMSNormEps)
	m.project(l, hf.Gate, s.gate, s.n2, View{})
	m.project(l, hf.Up, s.up, s.n2, View{})
	m.ops.GLU(s.y, s.gate, s.up, m.act)
	if !s.down.IsZero() {
		m.project(l, hf.Down, s.down, s.y, View{})
		m.ops.RMSNorm(rows(branch).Slice(tensor.Seq, 0, s.down.Rows()), s.downInv, s.down, l[hf.MLPNorm].w,
			m.cfg.RMSNormEps)
	}
}

// mlpBackward replaces d, the gradient of out, by the gradient of h. Since h = x + ..., that is the first part of the
// gradient of x. Gradients reuse the memory of activations that are no longer needed.
func (m *Model) mlpBackward(l *layer, d View, s *activations) {
	ddown := d
	if !s.down.IsZero() {
		ddown = s.down
		m.ops.RMSNormBackward(ddown, l[hf.MLPNorm].g, d, s.down, s.downInv, l[hf.MLPNorm].w, false)
	}
	m.projectDW(l, hf.Down, ddown, s.y)
	dy := s.y
	m.linearDX(dy, ddown, &l[hf.Down], false)

	dgate, dup := s.gate, s.up
	m.ops.GLUBackward(dgate, dup, dy, s.gate, s.up, m.act)

	m.projectDW(l, hf.Gate, dgate, s.n2)
	m.projectDW(l, hf.Up, dup, s.n2)
	dn2 := s.n2
	m.linearDX(dn2, dgate, &l[hf.Gate], false)
	m.linearDX(dn2, dup, &l[hf.Up], true)
	m.ops.RMSNormBackward(d, l[hf.PostNorm].g, dn2, s.h, s.inv2, l[hf.PostNorm].w, true)
}

func shape(v View) []int {
	s := v.Shape()
	return s[:]
}

// activations are the tensors of one layer for its backward pass. Save selects those kept from the forward pass. Others
// are zero until they are computed again.
type activations struct {
	mark  tensor.Mark // start of this layer in the arena
	host  bool        // the hooks Keep and Bring move it
	saved []View      // their views

	x   View              // [B, S, 1, E], the layer's input
	out attention.Partial // [B, S, H, D] in the type of activations, and [B, S, H, 1]

	q, k, v    View // [B, S, H, D], [B, S, K, D], [B, S, K, D], rotated
	qRaw, kRaw View // with head norms, the inputs of these; else zero
	qInv, kInv View // [B, S, H, 1], [B, S, K, 1], of head norms

	// Computed row by row: all tokens or one tile.
	inv1, n1    View // [B, S, 1, 1] and [B, S, 1, E], the norm of x
	h           View // [B, S, 1, E], x plus attention
	inv2, n2    View // its norm
	gate, up, y View // [B, S, 1, F]; y = act(gate) * up

	// With norms of branches, their inputs and scales; else zero.
	proj, down       View // [B, S, 1, E]
	projInv, downInv View // [B, S, 1, 1]
}

// The ends of groups of views: kept by SaveInput and by SaveOutput, of attention, of the norm of x, and of the MLP.
const untilInput, untilOutput, untilAttention, untilNorm, untilAll = 1, 3, 10, 12, 22

// views lists the views in the order of their groups.
func (s *activations) views() [untilAll]*View {
	return [...]*View{&s.x, &s.out.O, &s.out.LSE, &s.q, &s.k, &s.v, &s.qRaw, &s.kRaw, &s.qInv, &s.kInv,
		&s.inv1, &s.n1, &s.h, &s.inv2, &s.n2, &s.gate, &s.up, &s.y,
		&s.proj, &s.down, &s.projInv, &s.downInv}
}

// alloc allocates the missing views from the end of one group to the end of another.
func (m *Model) alloc(a *tensor.Arena, s *activations, lo, hi, batch, seq int) {
	c, t, f := m.cfg, m.dtype, m.accum
	H, K, D, E, F := c.NumAttentionHeads, c.NumKeyValueHeads, c.HeadDim, c.HiddenSize, c.IntermediateSize
	has := func(norm hf.Role) int { return min(1, len(c.Family().Tensors[norm])) }
	raw, branch := has(hf.QueryNorm), has(hf.AttentionNorm)
	shapes := [untilAll]struct {
		t          tensor.DType
		heads, dim int
	}{{t, 1, E}, {t, H, D}, {f, H, 1}, {t, H, D}, {t, K, D}, {t, K, D},
		{t, raw * H, D}, {t, raw * K, D}, {f, raw * H, 1}, {f, raw * K, 1},
		{f, 1, 1}, {t, 1, E}, {t, 1, E}, {f, 1, 1}, {t, 1, E}, {t, 1, F}, {t, 1, F}, {t, 1, F},
		{t, branch, E}, {t, branch, E}, {f, branch, 1}, {f, branch, 1}}
	views := s.views()
	for i := lo; i < hi; i++ {
		if v, x := views[i], shapes[i]; v.IsZero() && x.heads > 0 {
			*v = a.Alloc(x.t, batch, seq, x.heads, x.dim)
		}
	}
}

func (m *Model) allocTile(a *tensor.Arena, s *activations, lo, hi int) {
	m.alloc(a, s, lo, hi, 1, min(m.opt.tile, s.x.Rows()))
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
			if m.row = lo; !yield(lo, min(lo+m.opt.tile, n)) || m.dryRun {
				return // the others of a plan are no larger
			}
		}
	}
}

// place allocates the activations that the layers keep, and an element with the last layer's output. Layers that share
// memory get it at the lowest of them, which is released last.
func (m *Model) place(a *tensor.Arena, b Batch) []activations {
	layers := make([]activations, len(m.layers)+1)
	var slots [HostSlots]activations
	inputs, above, moved := make([]activations, len(m.layers)), 0, 0 // above counts the layers since the last kept input
	var passing [2]activations                                       // of layers without a backward pass
	for i := range layers {
		mark, at, r := a.Mark(), &activations{}, Retain{Save: SaveInput}
		if i < len(m.layers) {
			r = m.opt.Layers[i]
		}
		switch {
		case i < m.lowest:
			at, r.Save = &passing[i%2], SaveInput
		case r.Save == SaveNothing:
			at, r = &inputs[above], Retain{Save: SaveInput}
			above++
		case r.Host:
			at, above = &slots[moved%HostSlots], 0
			moved++
		default:
			above = 0
		}
		end := [...]int{untilAll, untilOutput, untilInput}[r.Save]
		m.alloc(a, at, 0, end, b.IDs.Len(tensor.Batch), b.IDs.Len(tensor.Seq))
		layers[i].mark, layers[i].host = mark, r.Host
		to, from := layers[i].views(), at.views()
		for j := range end {
			if *to[j] = *from[j]; r.Host && i >= m.lowest && !to[j].IsZero() {
				layers[i].saved = append(layers[i].saved, *to[j])
			}
		}
	}
	for i, stay := len(m.layers)-1, HostSlots; i >= 0 && stay > 0; i-- { // no other takes their slots
		if layers[i].host {
			layers[i].saved, stay = nil, stay-1
		}
	}
	return layers
}

// saved returns the views that Keep and Bring get of each layer for a batch, without memory.
func (m *Model) saved(batch, tokens int) [][]View {
	b, _ := phantomBatch(m.cfg, batch, tokens)
	var saved [][]View
	for _, s := range m.place(tensor.NewMeter(), b)[:len(m.layers)] {
		saved = append(saved, s.saved)
	}
	return saved
}
