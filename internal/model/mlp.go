package model

import "github.com/cprun/cprun/internal/model/hf"

// gatedMLP is the MLP of llama:
//
//	out = h + Wdown y,  y = act(Wgate n2) * Wup n2,  n2 = norm(h)
//
// or, with a norm of the branch or a scale, h + norm(Wdown y).
type gatedMLP struct{ *layer }

type mlpViews struct {
	inv2, n2    View // [B, S, 1, 1] and [B, S, 1, E], the norm of h, if the family has it; else zero
	gate, up, y View // [B, S, 1, F]

	// If the summand is not the product, the product, its scale and, for a tile that is computed again, the summand.
	down, downInv, branch View // [B, S, 1, E], [B, S, 1, 1], [B, S, 1, E]
}

func (l *gatedMLP) views(list []saved, m *Model, s *activations) []saved {
	t, f, e, n, input := m.dtype, m.accum, m.cfg.HiddenSize, m.changes(l.layer, hf.MLPNorm), l.copies(hf.PostNorm)
	return append(list, []saved{
		{&s.inv2, f, input, 1, ofTile},
		{&s.n2, t, input, e, ofTile},
		{&s.gate, t, 1, l.MLP.Width, ofTile},
		{&s.up, t, 1, l.MLP.Width, ofTile},
		{&s.y, t, 1, l.MLP.Width, ofTile},
		{&s.down, t, n, e, ofTile},
		{&s.downInv, f, n, 1, ofTile},
		{&s.branch, t, n, e, ofAgain},
	}...)

}

func (l *gatedMLP) forward(p *pass, t *activations, out View) {
	n2 := t.n2
	if n2.IsZero() {
		n2 = t.h
		p.ops.Add(t.h, t.x)
	} else {
		p.ops.AddRMSNorm(n2, t.inv2, t.h, t.h, t.x, l.at(hf.PostNorm).w, p.cfg.RMSNormEps)
	}
	p.project(l.layer, hf.Gate, t.gate, n2, View{})
	p.project(l.layer, hf.Up, t.up, n2, View{})
	p.ops.GLU(t.y, t.gate, t.up, p.act)
	again := out.IsZero()
	if t.down.IsZero() {
		if !again {
			p.project(l.layer, hf.Down, out, t.y, t.h)
		}
		return
	}
	branch := out
	if again {
		branch = t.branch
	}
	p.project(l.layer, hf.Down, t.down, t.y, View{})
	p.summand(l.layer, hf.MLPNorm, branch, t.downInv, t.down)
	if !again {
		p.ops.Add(out, t.h)
	}
}

// backward reuses the memory of activations that are no longer needed. Since h = x + ..., the gradient of h is also the
// first part of the gradient of x.
func (l *gatedMLP) backward(p *pass, d View, t *activations) {
	ddown := d
	if !t.down.IsZero() {
		ddown = t.down
		p.summandBackward(l.layer, hf.MLPNorm, ddown, d, t.downInv)
	}
	p.projectDW(l.layer, hf.Down, ddown, t.y)
	dy := t.y
	p.linearDX(dy, ddown, l.at(hf.Down), false)

	dgate, dup := t.gate, t.up
	p.ops.GLUBackward(dgate, dup, dy, t.gate, t.up, p.act)

	n2, dn2, normed := t.n2, t.n2, !t.n2.IsZero()
	if !normed {
		n2, dn2 = t.h, d
	}
	p.projectDW(l.layer, hf.Gate, dgate, n2)
	p.projectDW(l.layer, hf.Up, dup, n2)
	p.linearDX(dn2, dgate, l.at(hf.Gate), !normed)
	p.linearDX(dn2, dup, l.at(hf.Up), true)
	if norm := l.at(hf.PostNorm); normed {
		p.ops.RMSNormBackward(d, norm.g, dn2, t.h, t.inv2, norm.w, true)
	}
}
