package model

import "github.com/cprun/cprun/internal/model/hf"

// mlpBranch is the second branch of a layer:
//
//	out = h + mlp(n2),  n2 = norm(h)
//
// or, with a norm of the branch or a scale, h + norm(mlp(n2)).
type mlpBranch struct {
	*layer
	mlp mlp
}

// An mlp is a function of each token, on tiles.
type mlp interface {
	views(list []saved, m *Model, s *activations) []saved
	// forward sets y to add plus the function of x. Without y, it sets the views for backward only.
	forward(p *pass, t *activations, y, x, add View)
	// backward sets dx to the gradient of x, or adds it, given dy. dx may be x. It may overwrite t.
	backward(p *pass, dx, dy, x View, t *activations, accumulate bool)
}

func newMLP(l *layer) mlp {
	switch {
	case l.MLP.Experts.Count == 0:
		return &gated{l, hf.Gate, hf.Up, hf.Down, ""}
	case l.MLP.Width == 0:
		return &experts{layer: l}
	case l.MLP.Apart:
		return &apart{l, &gated{l, hf.SharedGate, hf.SharedUp, hf.SharedDown, ""}, &experts{layer: l}}
	}
	return &experts{l, &gated{l, hf.SharedGate, hf.SharedUp, hf.SharedDown, hf.SharedScale}}
}

type mlpViews struct {
	inv2, n2    View // [B, S, 1, 1] and [B, S, 1, E], the norm of h, if the family has it; else zero
	gate, up, y View // [B, S, 1, F]
	// With a factor for each token: its argument, [B, S, 1, 1], and the product of y with it.
	scale, scaled View
	expertViews
	apartViews

	// If the summand is not the mlp's result, that, its scale and, for a tile that is computed again, the summand.
	down, downInv, branch View // [B, S, 1, E], [B, S, 1, 1], [B, S, 1, E]
}

func (l *mlpBranch) views(list []saved, m *Model, s *activations) []saved {
	t, f, e, n, input := m.dtype, m.accum, m.cfg.HiddenSize, m.changes(l.layer, hf.MLPNorm), l.copies(hf.PostNorm)
	return l.mlp.views(append(list, []saved{
		{&s.inv2, f, input, 1, ofTile, 0},
		{&s.n2, t, input, e, ofTile, 0},
		{&s.down, t, n, e, ofTile, 0},
		{&s.downInv, f, n, 1, ofTile, 0},
		{&s.branch, t, n, e, ofAgain, 0},
	}...), m, s)
}

// forward sets out. Without out, it sets the views for backward only. t.h holds the mixer's summand until it adds t.x.
func (l *mlpBranch) forward(p *pass, t *activations, out View) {
	n2 := t.n2
	if n2.IsZero() {
		n2 = t.h
		p.ops.Add(t.h, t.x)
	} else {
		p.ops.AddRMSNorm(n2, t.inv2, t.h, t.h, t.x, l.at(hf.PostNorm).w, p.cfg.RMSNormEps)
	}
	if t.down.IsZero() {
		l.mlp.forward(p, t, out, n2, t.h)
		return
	}
	branch, again := out, out.IsZero()
	if again {
		branch = t.branch
	}
	l.mlp.forward(p, t, t.down, n2, View{})
	p.summand(l.layer, hf.MLPNorm, branch, t.downInv, t.down)
	if !again {
		p.ops.Add(out, t.h)
	}
}

// backward replaces d, the gradient of out, by the gradient of h. It may overwrite t. Since h = x + ..., the gradient
// of h is also the first part of the gradient of x.
func (l *mlpBranch) backward(p *pass, d View, t *activations) {
	dy := d
	t.dh = d
	if !t.down.IsZero() {
		dy = t.down
		p.summandBackward(l.layer, hf.MLPNorm, dy, d, t.downInv)
	}
	if t.n2.IsZero() {
		l.mlp.backward(p, d, dy, t.h, t, true)
		return
	}
	norm, dn2 := l.at(hf.PostNorm), t.n2 // no longer needed
	l.mlp.backward(p, dn2, dy, t.n2, t, false)
	p.ops.RMSNormBackward(d, norm.g, dn2, t.h, t.inv2, norm.w, true)
}

// gated is the MLP of llama, Wdown y with y = act(Wgate x) * Wup x. If the layer has the part scale, y is multiplied by
// the sigmoid of its product with x.
type gated struct {
	*layer
	gate, up, down, scale hf.Role
}

func (l *gated) views(list []saved, m *Model, s *activations) []saved {
	t, f, scales := m.dtype, l.MLP.Width, l.copies(l.scale)
	return append(list, saved{&s.gate, t, 1, f, ofTile, 0}, saved{&s.up, t, 1, f, ofTile, 0},
		saved{&s.y, t, 1, f, ofTile, 0}, saved{&s.scale, t, scales, 1, ofTile, 0}, saved{&s.scaled, t, scales, f, ofTile, 0})
}

func (l *gated) forward(p *pass, t *activations, y, x, add View) {
	defer p.a.Release(p.a.Mark())
	in := p.operand(x, l.at(l.gate), l.at(l.up))
	p.project(l.layer, l.gate, t.gate, in, View{})
	p.project(l.layer, l.up, t.up, in, View{})
	p.ops.GLU(t.y, t.gate, t.up, p.act)
	if !t.scale.IsZero() {
		p.project(l.layer, l.scale, t.scale, in, View{})
		p.ops.Gate(t.scaled, t.y, t.scale)
	}
	if !y.IsZero() {
		p.project(l.layer, l.down, y, p.operand(l.result(t), l.at(l.down)), add)
	}
}

// result returns the input of the last product.
func (l *gated) result(t *activations) View {
	if t.scale.IsZero() {
		return t.y
	}
	return t.scaled
}

// backward reuses the memory of activations that are no longer needed.
func (l *gated) backward(p *pass, dx, dy, x View, t *activations, accumulate bool) {
	defer p.a.Release(p.a.Mark())
	result, gate, up, down := l.result(t), l.at(l.gate), l.at(l.up), l.at(l.down)
	dout := p.gradient(dy, down, true)
	p.projectDW(l.layer, l.down, dout, p.inputDW(result, down))
	p.linearDX(result, dout, down, false)
	in, dscale := p.inputDW(x, gate, up), operand{View: t.scale}
	if !t.scale.IsZero() {
		p.ops.GateBackward(result, t.scale, result, t.y, t.scale)
		p.projectDW(l.layer, l.scale, dscale, in)
	}
	p.ops.GLUBackward(t.gate, t.up, result, t.gate, t.up, p.act)
	dgate, dup := p.gradient(t.gate, gate, true), p.gradient(t.up, up, true)
	p.projectDW(l.layer, l.gate, dgate, in)
	p.projectDW(l.layer, l.up, dup, in)
	p.linearDX(dx, dgate, gate, accumulate)
	p.linearDX(dx, dup, up, true)
	if !t.scale.IsZero() {
		p.linearDX(dx, dscale, l.at(l.scale), true)
	}
}
