package model

import (
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// gatedMLP is the MLP of llama:
//
//	out = h + Wdown y,  y = act(Wgate n2) * Wup n2,  n2 = norm(h);  with a norm of the branch, h + norm(Wdown y)
type gatedMLP struct{ *layer }

type mlpViews struct {
	inv2, n2    View // [B, S, 1, 1] and [B, S, 1, E], the norm of h
	gate, up, y View // [B, S, 1, F]

	// With a norm of the branch, its input, scale and, for a tile that is computed again, result; else zero.
	down, downInv, branch View // [B, S, 1, E], [B, S, 1, 1], [B, S, 1, E]
}

func (l *gatedMLP) views(list []saved, m *Model, s *activations) []saved {
	t, f, e, n := m.dtype, m.accum, m.cfg.HiddenSize, l.copies(hf.MLPNorm)
	return append(list, []saved{
		{&s.inv2, f, 1, 1, ofTile},
		{&s.n2, t, 1, e, ofTile},
		{&s.gate, t, 1, l.MLP.Width, ofTile},
		{&s.up, t, 1, l.MLP.Width, ofTile},
		{&s.y, t, 1, l.MLP.Width, ofTile},
		{&s.down, t, n, e, ofTile},
		{&s.downInv, f, n, 1, ofTile},
		{&s.branch, t, n, e, ofAgain},
	}...)

}

func (l *gatedMLP) forward(p *pass, t *activations, out View) {
	p.ops.AddRMSNorm(t.n2, t.inv2, t.h, t.h, t.x, l.at(hf.PostNorm).w, p.cfg.RMSNormEps)
	p.project(l.layer, hf.Gate, t.gate, t.n2, View{})
	p.project(l.layer, hf.Up, t.up, t.n2, View{})
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
	p.ops.RMSNorm(branch, t.downInv, t.down, l.at(hf.MLPNorm).w, p.cfg.RMSNormEps)
	if !again {
		p.ops.Add(out, t.h)
	}
}

// backward reuses the memory of activations that are no longer needed. Since h = x + ..., the gradient of h is also the
// first part of the gradient of x.
func (l *gatedMLP) backward(p *pass, d View, t *activations) {
	ddown := d
	if !t.down.IsZero() {
		after := l.at(hf.MLPNorm)
		ddown = t.down
		p.ops.RMSNormBackward(ddown, after.g, d, t.down, t.downInv, after.w, false)
	}
	p.projectDW(l.layer, hf.Down, ddown, t.y)
	dy := t.y
	p.linearDX(dy, ddown, l.at(hf.Down), false)

	dgate, dup := t.gate, t.up
	p.ops.GLUBackward(dgate, dup, dy, t.gate, t.up, p.act)

	p.projectDW(l.layer, hf.Gate, dgate, t.n2)
	p.projectDW(l.layer, hf.Up, dup, t.n2)
	dn2, norm := t.n2, l.at(hf.PostNorm)
	p.linearDX(dn2, dgate, l.at(hf.Gate), false)
	p.linearDX(dn2, dup, l.at(hf.Up), true)
	p.ops.RMSNormBackward(d, norm.g, dn2, t.h, t.inv2, norm.w, true)
}

// project sets y to the projection of x, with its bias, plus add unless that is the zero View.
func (p *pass) project(l *layer, r hf.Role, y, x, add View) {
	if bias := l.at(r.Bias()).w; !bias.IsZero() { // y begins as the bias of every row
		n := y.Cols()
		p.ops.Copy(y, tensor.NewView(bias.Memory(), bias.DType(), bias.Offset(), [4]int{1, y.Rows(), 1, n},
			[4]int64{0, 0, 0, 1}))
		if !add.IsZero() {
			p.ops.Add(y, add)
		}
		add = y
	}
	p.linear(y, x, l.at(r), add)
}

// projectDW adds to the gradients of a projection's weight and bias.
func (p *pass) projectDW(l *layer, r hf.Role, dy, x View) {
	p.linearDW(l.at(r), dy, x)
	if bias := l.at(r.Bias()).g; !bias.IsZero() {
		p.ops.SumRows(bias, dy)
	}
}
