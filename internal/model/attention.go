package model

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// attend is softmax attention over all ranks that share the sequence:
//
//	h   = Wo attention(q, k, v);  with a norm of the branch, its norm
//	q   = rope(norm(qRaw)), qRaw = Wq n1, n1 = norm(x); k likewise; without head norms in place
type attend struct{ *layer }

type attendViews struct {
	q, k, v    View // [B, S, H, D], [B, S, K, D], [B, S, K, Dv], rotated
	qRaw, kRaw View // with head norms, the inputs of these; else zero
	qInv, kInv View // [B, S, H, 1], [B, S, K, 1], of head norms
	inv1, n1   View // [B, S, 1, 1] and [B, S, 1, E], the norm of x

	proj, projInv View // [B, S, 1, E], [B, S, 1, 1]: with a norm of the branch, its input and scale; else zero
}

func (l *attend) views(list []saved, m *Model, s *activations) []saved {
	t, f, x, e := m.dtype, m.accum, l.Mixer, m.cfg.HiddenSize
	raw, branch := l.copies(hf.QueryNorm), l.copies(hf.AttentionNorm)
	return append(list, []saved{
		{&s.out.O, t, x.Heads, x.DimV, ofOutput},
		{&s.out.LSE, f, x.Heads, 1, ofOutput},
		{&s.q, t, x.Heads, x.Dim, ofMixer},
		{&s.k, t, x.KVHeads, x.Dim, ofMixer},
		{&s.v, t, x.KVHeads, x.DimV, ofMixer},
		{&s.qRaw, t, raw * x.Heads, x.Dim, ofMixer},
		{&s.kRaw, t, raw * x.KVHeads, x.Dim, ofMixer},
		{&s.qInv, f, raw * x.Heads, 1, ofMixer},
		{&s.kInv, f, raw * x.KVHeads, 1, ofMixer},
		{&s.inv1, f, 1, 1, ofMixerTile},
		{&s.n1, t, 1, e, ofMixerTile},
		{&s.proj, t, branch, e, ofTile},
		{&s.projInv, f, branch, 1, ofTile},
	}...)

}

func (l *attend) forward(p *pass, s *activations, known bool) error {
	p.alloc(l.layer, s, ofOutput, ofMixer)
	mark, rows := p.a.Mark(), *s
	p.allocTile(l.layer, &rows, ofMixerTile, ofMixerTile)
	for lo, hi := range p.tiles(s.x) {
		t := p.tile(l.layer, &rows, lo, hi)
		q, k := t.raw()
		p.ops.RMSNorm(t.n1, t.inv1, t.x, l.at(hf.InputNorm).w, p.cfg.RMSNormEps)
		p.project(l.layer, hf.Query, q, t.n1, View{})
		p.project(l.layer, hf.Key, k, t.n1, View{})
		p.project(l.layer, hf.Value, t.v, t.n1, View{})
	}
	p.a.Release(mark)
	q, k := s.raw()
	cos, sin := p.angles(l.layer)
	p.ops.NormRope(s.q, s.qInv, q, l.at(hf.QueryNorm).w, cos, sin, p.cfg.RMSNormEps)
	p.ops.NormRope(s.k, s.kInv, k, l.at(hf.KeyNorm).w, cos, sin, p.cfg.RMSNormEps)
	if known {
		return nil
	}
	return p.att.Forward(l.index, s.out, s.q, s.k, s.v)
}

// raw returns the projections before norm and rotation; without head norms the memory of the rotated ones.
func (s *activations) raw() (q, k View) {
	if s.qRaw.IsZero() {
		return s.q, s.k
	}
	return s.qRaw, s.kRaw
}

// angles returns the rotary tables of a layer: zero Views if it does not rotate.
func (p *pass) angles(l *layer) (cos, sin View) {
	if l.Rope < 0 {
		return View{}, View{}
	}
	n := p.b.IDs.Len(tensor.Batch)
	lo := p.b.Cos.Len(tensor.Batch) / p.cfg.Ropes() * l.Rope
	return p.b.Cos.Slice(tensor.Batch, lo, lo+n), p.b.Sin.Slice(tensor.Batch, lo, lo+n)
}

func (l *attend) output(p *pass, t *activations) {
	if t.proj.IsZero() {
		p.project(l.layer, hf.Output, t.h, t.out.O, View{})
		return
	}
	p.project(l.layer, hf.Output, t.proj, t.out.O, View{})
	p.ops.RMSNorm(t.h, t.projInv, t.proj, l.at(hf.AttentionNorm).w, p.cfg.RMSNormEps)
}

func (l *attend) outputBackward(p *pass, do, d View, t *activations) {
	if !t.proj.IsZero() {
		after := l.at(hf.AttentionNorm)
		p.ops.RMSNormBackward(t.proj, after.g, d, t.proj, t.projInv, after.w, false)
		d = t.proj
	}
	p.projectDW(l.layer, hf.Output, d, t.out.O)
	p.linearDX(do, d, l.at(hf.Output), false)
}

func (l *attend) backward(p *pass, d, do View, s *activations) error {
	mark := p.a.Mark()
	g := attention.Grads{
		DQ: p.a.Alloc(p.accum, shape(s.q)...),
		DK: p.a.Alloc(p.accum, shape(s.k)...),
		DV: p.a.Alloc(p.accum, shape(s.v)...),
	}
	if err := p.att.Backward(l.index, g, do, s.q, s.k, s.v, s.out); err != nil {
		return err
	}
	dq, dk, dv := do, s.k, s.v // no longer needed
	qRaw, kRaw := s.raw()
	cos, sin := p.angles(l.layer)
	qNorm, kNorm := l.at(hf.QueryNorm), l.at(hf.KeyNorm)
	p.ops.NormRopeBackward(dq, qNorm.g, g.DQ, qRaw, s.qInv, qNorm.w, cos, sin)
	p.ops.NormRopeBackward(dk, kNorm.g, g.DK, kRaw, s.kInv, kNorm.w, cos, sin)
	p.ops.Copy(dv, g.DV)
	p.a.Release(mark)

	p.allocTile(l.layer, s, ofMixerTile, ofMixerTile)
	for lo, hi := range p.tiles(s.x) {
		t := p.tile(l.layer, s, lo, hi)
		if !s.all {
			p.ops.RMSNorm(t.n1, t.inv1, t.x, l.at(hf.InputNorm).w, p.cfg.RMSNormEps)
		}
		l.inputBackward(p, part(d, lo, hi), part(dq, lo, hi), part(dk, lo, hi), part(dv, lo, hi), &t)
	}
	return nil
}

// inputBackward needs no gradient of the norm's input if no parameter below is trained.
func (l *attend) inputBackward(p *pass, d, dq, dk, dv View, t *activations) {
	p.projectDW(l.layer, hf.Query, dq, t.n1)
	p.projectDW(l.layer, hf.Key, dk, t.n1)
	p.projectDW(l.layer, hf.Value, dv, t.n1)
	norm := l.at(hf.InputNorm)
	if l.index <= p.lowest && norm.frozen {
		return
	}
	dn1 := t.n1 // no longer needed
	p.linearDX(dn1, dq, l.at(hf.Query), false)
	p.linearDX(dn1, dk, l.at(hf.Key), true)
	p.linearDX(dn1, dv, l.at(hf.Value), true)
	p.ops.RMSNormBackward(d, norm.g, dn1, t.x, t.inv1, norm.w, true)
}
