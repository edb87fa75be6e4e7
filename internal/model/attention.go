package model

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// attend is softmax attention over all ranks that share the sequence:
//
//	h   = Wo attention(q, k, v);  with a norm of the branch, its norm, or scaled
//	q   = rope(norm(qRaw)), qRaw = Wq n1, n1 = norm(x); k likewise; without head norms in place
//
// v is Wv n1, or with KeyValues Wk n1; with value norms it is normalised.
//
// With gates, Wo multiplies the result times their sigmoids. The projection of queries has a head's rows, then its
// gate's.
//
// Sinks are folded in after all hops, so no transfer or kernel knows of them.
type attend struct{ *layer }

type attendViews struct {
	q, k, v    View // [B, S, H, D], [B, S, K, D], [B, S, K, Dv], rotated
	qRaw, kRaw View // with head norms, the inputs of these; else zero
	qInv, kInv View // [B, S, H, 1], [B, S, K, 1], of head norms; [B, S, 1, 1] of norms over all heads
	vRaw, vInv View // likewise of value norms; with KeyValues vRaw is zero, since it is kRaw
	outGate    View // [B, S, H, Dv], the gate of the result, if the family has it; later its gradient
	inv1, n1   View // [B, S, 1, 1] and [B, S, 1, E], the norm of x, if the family has it; else zero

	gated         View // [B, S, H, Dv], the result times the gate's sigmoid
	proj, projInv View // [B, S, 1, E], [B, S, 1, 1]: if the summand is not the product, the product and its scale
}

func (l *attend) views(list []saved, m *Model, s *activations) []saved {
	t, f, x, e := m.dtype, m.accum, l.Mixer, m.cfg.HiddenSize
	raw, branch, input := l.copies(hf.QueryNorm), m.changes(l.layer, hf.AttentionNorm), l.copies(hf.InputNorm)
	gates, qInv, kInv, vInv, vRaw := 0, x.Heads, x.KVHeads, 0, 0
	if x.ValueNorms {
		vInv, vRaw = x.KVHeads, x.KVHeads
	}
	if x.KeyValues {
		vRaw = 0
	}
	if x.Gated {
		gates = x.Heads
	}
	if x.WideNorms {
		qInv, kInv = 1, 1
	}
	return append(list, []saved{
		{&s.out.O, t, x.Heads, x.DimV, ofOutput, 0},
		{&s.out.LSE, f, x.Heads, 1, ofOutput, 0},
		{&s.outGate, t, gates, x.DimV, ofOutput, 0}, // the output needs it
		{&s.q, t, x.Heads, x.Dim, ofMixer, 0},
		{&s.k, t, x.KVHeads, x.Dim, ofMixer, 0},
		{&s.v, t, x.KVHeads, x.DimV, ofMixer, 0},
		{&s.qRaw, t, raw * x.Heads, x.Dim, ofMixer, 0},
		{&s.kRaw, t, raw * x.KVHeads, x.Dim, ofMixer, 0},
		{&s.qInv, f, raw * qInv, 1, ofMixer, 0},
		{&s.kInv, f, raw * kInv, 1, ofMixer, 0},
		{&s.vRaw, t, vRaw, x.DimV, ofMixer, 0},
		{&s.vInv, f, vInv, 1, ofMixer, 0},
		{&s.inv1, f, input, 1, ofMixerTile, 0},
		{&s.n1, t, input, e, ofMixerTile, 0},
		{&s.gated, t, gates, x.DimV, ofTile, 0},
		{&s.proj, t, branch, e, ofTile, 0},
		{&s.projInv, f, branch, 1, ofTile, 0},
	}...)

}

func (l *attend) forward(p *pass, s *activations, known bool) error {
	p.alloc(l.layer, s, ofOutput, ofMixer)
	mark, rows := p.a.Mark(), *s
	p.allocTile(l.layer, &rows, ofMixerTile, ofMixerTile)
	for lo, hi := range p.tiles(s.x) {
		t := p.tile(l.layer, &rows, lo, hi)
		q, k, v := t.raw()
		each := p.a.Mark()
		n1 := p.operand(l.input(p, &t, false), l.at(hf.Query), l.at(hf.Key), l.at(hf.Value))
		l.queries(p, q, n1, &t)
		p.project(l.layer, hf.Key, k, n1, View{})
		if !l.Mixer.KeyValues {
			p.project(l.layer, hf.Value, v, n1, View{})
		}
		p.a.Release(each)
	}
	p.a.Release(mark)
	q, k, v := s.raw()
	if l.Mixer.ValueNorms {
		l.normRope(p, s.v, s.vInv, v, valueNorm, -1)
	}
	l.normRope(p, s.q, s.qInv, q, hf.QueryNorm, l.Rope.Query)
	l.normRope(p, s.k, s.kInv, k, hf.KeyNorm, l.Rope.Key)
	if known {
		return nil
	}
	err := p.att.Forward(l.index, s.out, s.q, s.k, s.v)
	if sinks := l.at(hf.Sinks).w; err == nil && !sinks.IsZero() {
		err = p.ops.FoldSink(s.out.O, s.out.LSE, byHead(sinks))
	}
	return err
}

// queries sets q, and the gates of the result.
func (l *attend) queries(p *pass, q View, n1 operand, t *activations) {
	if t.outGate.IsZero() {
		p.project(l.layer, hf.Query, q, n1, View{})
		return
	}
	defer p.a.Release(p.a.Mark())
	both, of, gates := l.joint(p, q)
	p.project(l.layer, hf.Query, both, n1, View{})
	p.ops.Copy(l.heads(q), of)
	p.ops.Copy(l.heads(t.outGate), gates)
}

// joint allocates the result of the projection of queries with their gates, and returns the parts of each in it.
func (l *attend) joint(p *pass, q View) (both, of, gates View) {
	d := l.Mixer.Dim
	both = p.a.Alloc(p.dtype, 1, q.Rows(), l.Mixer.Heads, d+l.Mixer.DimV)
	return rows(both), both.Slice(tensor.Dim, 0, d), both.Slice(tensor.Dim, d, d+l.Mixer.DimV)
}

// heads returns the query heads of a tile, [1, T, H, D].
func (l *attend) heads(v View) View {
	return v.Reshape([4]int{1, v.Rows(), l.Mixer.Heads, v.Cols() / l.Mixer.Heads})
}

// byHead returns a vector as [1, 1, H, 1].
func byHead(v View) View { return v.Reshape([4]int{1, 1, v.Size(), 1}) }

// input returns the input of the projections: the norm of x, known or not, or x in a family without it.
func (l *layer) input(p *pass, t *activations, known bool) View {
	if t.n1.IsZero() {
		return t.x
	}
	if !known {
		p.ops.RMSNorm(t.n1, t.inv1, t.x, l.at(hf.InputNorm).w, p.cfg.RMSNormEps)
	}
	return t.n1
}

// normRope sets y to the rotation of x by a table, after a norm if the layer has it.
func (l *attend) normRope(p *pass, y, inv, x View, norm hf.Role, table int) {
	cos, sin := p.angles(table)
	w := l.at(norm).w
	if l.Mixer.WideNorms {
		p.ops.RMSNorm(rows(y), rows(inv), rows(x), w, p.cfg.RMSNormEps)
		x, w = y, View{}
	}
	p.ops.NormRope(y, inv, x, w, cos, sin, p.cfg.RMSNormEps)
}

// normRopeBackward sets dx to the gradient of x, given dy. It may overwrite x.
func (l *attend) normRopeBackward(p *pass, dx, dy, x, inv View, norm hf.Role, table int) {
	cos, sin := p.angles(table)
	at := l.at(norm)
	if !l.Mixer.WideNorms {
		p.ops.NormRopeBackward(dx, at.g, dy, x, inv, at.w, cos, sin)
		return
	}
	p.ops.NormRopeBackward(dx, View{}, dy, View{}, View{}, View{}, cos, sin)
	p.ops.RMSNormBackward(rows(x), at.g, rows(dx), rows(x), rows(inv), at.w, false)
	p.ops.Copy(dx, x)
}

// raw returns the projections before norm and rotation; without head norms the memory of the rotated ones.
func (s *activations) raw() (q, k, v View) {
	q, k, v = s.q, s.k, s.v
	if !s.qRaw.IsZero() {
		q, k = s.qRaw, s.kRaw
	}
	switch {
	case !s.vRaw.IsZero():
		v = s.vRaw
	case !s.vInv.IsZero():
		v = k
	}
	return q, k, v
}

// angles returns a rotary table; zero Views for -1.
func (p *pass) angles(table int) (cos, sin View) {
	if table < 0 {
		return View{}, View{}
	}
	pairs, lo := p.cfg.RopePairs(), 0
	for _, n := range pairs[:table] {
		lo += p.b.Cos.Size() / p.cfg.AllPairs() * n
	}
	batch, seq, n := p.b.IDs.Len(tensor.Batch), p.b.IDs.Len(tensor.Seq), pairs[table]
	of := func(v View) View {
		v = v.Reshape([4]int{1, 1, 1, v.Size()}).Slice(tensor.Dim, lo, lo+batch*seq*n)
		return v.Reshape([4]int{batch, seq, 1, n})
	}
	return of(p.b.Cos), of(p.b.Sin)
}

func (l *attend) output(p *pass, t *activations) {
	defer p.a.Release(p.a.Mark())
	o := t.out.O
	if !t.gated.IsZero() {
		o = t.gated
		p.ops.Gate(o, t.out.O, t.outGate)
	}
	in := p.operand(o, l.at(hf.Output))
	if t.proj.IsZero() {
		p.project(l.layer, hf.Output, t.h, in, View{})
		return
	}
	p.project(l.layer, hf.Output, t.proj, in, View{})
	p.summand(l.layer, hf.AttentionNorm, t.h, t.projInv, t.proj)
}

func (l *attend) outputBackward(p *pass, do, d View, t *activations) {
	if !t.proj.IsZero() {
		p.summandBackward(l.layer, hf.AttentionNorm, t.proj, d, t.projInv)
		d = t.proj
	}
	o := t.out.O
	if !t.gated.IsZero() {
		o = t.gated
	}
	defer p.a.Release(p.a.Mark())
	w := l.at(hf.Output)
	dy := p.gradient(d, w, true)
	p.projectDW(l.layer, hf.Output, dy, p.inputDW(o, w))
	p.linearDX(do, dy, w, false)
	if !t.gated.IsZero() {
		p.ops.GateBackward(do, t.outGate, do, t.out.O, t.outGate)
	}
}

func (l *attend) backward(p *pass, d, do View, s *activations) error {
	mark := p.a.Mark()
	if sinks := l.at(hf.Sinks); !sinks.g.IsZero() && !sinks.frozen {
		d := p.a.Alloc(p.accum, 1, 1, l.Mixer.Heads, 1)
		if err := p.ops.SinkGrad(d, do, s.out.O, s.out.LSE, byHead(sinks.w)); err != nil {
			return err
		}
		p.ops.Add(byHead(sinks.g), d)
		p.a.Release(mark)
	}
	g := attention.Grads{
		DQ: p.a.Alloc(p.accum, shape(s.q)...),
		DK: p.a.Alloc(p.accum, shape(s.k)...),
		DV: p.a.Alloc(p.accum, shape(s.v)...),
	}
	if err := p.att.Backward(l.index, g, do, s.q, s.k, s.v, s.out); err != nil {
		return err
	}
	qRaw, kRaw, vRaw := s.raw()
	dq, dk, dv := do, s.k, s.v // no longer needed
	if l.Mixer.ValueNorms {
		l.normRopeBackward(p, dv, g.DV, vRaw, s.vInv, valueNorm, -1)
	} else {
		p.ops.Copy(dv, g.DV)
	}
	l.normRopeBackward(p, dq, g.DQ, qRaw, s.qInv, hf.QueryNorm, l.Rope.Query)
	l.normRopeBackward(p, dk, g.DK, kRaw, s.kInv, hf.KeyNorm, l.Rope.Key)
	if l.Mixer.KeyValues {
		p.ops.Add(dk, dv)
	}
	p.a.Release(mark)

	p.allocTile(l.layer, s, ofMixerTile, ofMixerTile)
	for lo, hi := range p.tiles(s.x) {
		t := p.tile(l.layer, s, lo, hi)
		l.input(p, &t, s.all)
		l.inputBackward(p, part(d, lo, hi), part(dq, lo, hi), part(dk, lo, hi), part(dv, lo, hi), &t)
	}
	return nil
}

// inputBackward needs no gradient of the norm's input if no parameter below is trained.
func (l *attend) inputBackward(p *pass, d, dq, dk, dv View, t *activations) {
	defer p.a.Release(p.a.Mark())
	if !t.outGate.IsZero() {
		both, of, gates := l.joint(p, dq)
		p.ops.Copy(of, l.heads(dq))
		p.ops.Copy(gates, l.heads(t.outGate))
		dq = both
	}
	n1, normed := l.input(p, t, true), !t.n1.IsZero()
	q, k, v := l.at(hf.Query), l.at(hf.Key), l.at(hf.Value)
	norm := l.at(hf.InputNorm)
	dx := l.index > p.lowest || !norm.frozen && normed
	in, gq, gk, gv := p.inputDW(n1, q, k, v), p.gradient(dq, q, dx), p.gradient(dk, k, dx), p.gradient(dv, v, dx)
	p.projectDW(l.layer, hf.Query, gq, in)
	p.projectDW(l.layer, hf.Key, gk, in)
	if !l.Mixer.KeyValues {
		p.projectDW(l.layer, hf.Value, gv, in)
	}
	if !dx {
		return
	}
	dn1 := n1 // no longer needed
	if !normed {
		dn1 = d
	}
	p.linearDX(dn1, gq, q, !normed)
	p.linearDX(dn1, gk, k, true)
	if !l.Mixer.KeyValues {
		p.linearDX(dn1, gv, v, true)
	}
	if normed {
		p.ops.RMSNormBackward(d, norm.g, dn1, t.x, t.inv1, norm.w, true)
	}
}
