package model

import (
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// Both branches end with a summand of the residual, and begin with projections.

// changes returns 1 if the summand of a branch is not its last product, else 0.
func (m *Model) changes(l *layer, norm hf.Role) int {
	if m.cfg.ResidualMultiplier > 0 {
		return 1
	}
	return l.copies(norm)
}

// summand sets y to a branch's summand, given its last product x: the norm of x, or x times the residual multiplier.
func (p *pass) summand(l *layer, norm hf.Role, y, inv, x View) {
	if by := p.cfg.ResidualMultiplier; by > 0 {
		p.ops.Affine(y, x, by, 0)
		return
	}
	p.ops.RMSNorm(y, inv, x, l.at(norm).w, p.cfg.RMSNormEps)
}

// summandBackward replaces x by its gradient, given d, the gradient of the summand.
func (p *pass) summandBackward(l *layer, norm hf.Role, x, d, inv View) {
	if by := p.cfg.ResidualMultiplier; by > 0 {
		p.ops.Affine(x, d, by, 0)
		return
	}
	after := l.at(norm)
	p.ops.RMSNormBackward(x, after.g, d, x, inv, after.w, false)
}

// project sets y to the projection of x, with its bias, plus add unless that is the zero View.
func (p *pass) project(l *layer, r hf.Role, y View, x operand, add View) {
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
func (p *pass) projectDW(l *layer, r hf.Role, dy, x operand) {
	p.linearDW(l.at(r), dy, x)
	if bias := l.at(r.Bias()).g; !bias.IsZero() {
		p.ops.SumRows(bias, dy.View)
	}
}
