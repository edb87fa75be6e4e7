package model

import (
	"hash/fnv"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// An adapter is a low-rank product beside a matrix: y = W x + scale * B A dropout(x) (arXiv:2106.09685).
type adapter struct {
	a, b weight
	name uint64  // hash of the matrix's name, for random numbers
	rate float64 // of dropout
	size float64 // scale
}

func nameHash(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name)) // never fails
	return h.Sum64()
}

// adapt gives each matrix its adapter, by the name of the matrix in files. If files join several matrices, these share
// A, and each has its rows of B.
func (m *Model) adapt(adapters map[string]*adapter) {
	if len(adapters) == 0 {
		return
	}
	for _, t := range m.cfg.Tensors() {
		name, row, _ := t.Matrix()
		l := adapters[name]
		if l == nil {
			continue
		}
		part := *l
		for _, v := range []*View{&part.b.w, &part.b.g} {
			if !v.IsZero() {
				*v = v.Slice(tensor.Seq, row, row+t.Shape[0])
			}
		}
		m.at(Param{Tensor: t}).lora = &part
	}
}

// linear sets y to the product of x with a matrix and its adapter, plus add unless that is the zero View.
func (p *pass) linear(y View, x operand, w *weight, add View) {
	if w.scaled() {
		p.ops.ScaledLinear(y, x.byRow, w.codes, add)
	} else {
		p.ops.Linear(y, x.View, w.w, add)
	}
	if w.lora == nil {
		return
	}
	defer p.a.Release(p.a.Mark())
	p.ops.Linear(y, p.reduced(w.lora, p.dropped(w.lora, x.View)), w.lora.b.w, y)
}

// linearDX sets dx to the gradient of x, or adds it.
func (p *pass) linearDX(dx View, dy operand, w *weight, accumulate bool) {
	if w.scaled() {
		p.ops.ScaledLinear(dx, dy.byRow, w.turned, added(dx, accumulate))
	} else {
		p.ops.LinearDX(dx, dy.View, w.w, accumulate)
	}
	l := w.lora
	if l == nil {
		return
	}
	defer p.a.Release(p.a.Mark())
	du := p.reducedBack(l, dy.View)
	if p.tokens.IsZero() || l.rate == 0 {
		p.ops.LinearDX(dx, du, l.a.w, true)
		return
	}
	d := p.a.Alloc(p.dtype, shape(dx)...)
	p.ops.LinearDX(d, du, l.a.w, false)
	p.drop(l, d, d)
	p.ops.Add(dx, d)
}

// linearDW adds to the gradients of a matrix and its adapter, unless they are frozen. The first of a fresh pass
// overwrites that of the matrix.
func (p *pass) linearDW(w *weight, dy, x operand) {
	switch {
	case w.g.IsZero():
	case w.scaled():
		p.ops.ScaledLinear(w.g, dy.byColumn, x.byColumn, added(w.g, !w.fresh))
	default:
		p.ops.LinearDW(w.g, dy.View, x.View, !w.fresh)
	}
	w.fresh = w.fresh && w.g.IsZero()
	l := w.lora
	if l == nil {
		return
	}
	defer p.a.Release(p.a.Mark())
	in := p.dropped(l, x.View)
	if !l.b.g.IsZero() {
		p.ops.LinearDW(l.b.g, dy.View, p.reduced(l, in), true)
	}
	if !l.a.g.IsZero() {
		p.ops.LinearDW(l.a.g, p.reducedBack(l, dy.View), in, true)
	}
}

// added returns a result that is added to, else the zero View.
func added(v View, accumulate bool) View {
	if accumulate {
		return v
	}
	return View{}
}

// reduced returns scale * A x, [1, rows, 1, r].
func (p *pass) reduced(l *adapter, x View) View {
	u := p.a.Alloc(p.dtype, 1, x.Rows(), 1, l.a.w.Rows())
	p.ops.Linear(u, x, l.a.w, View{})
	p.ops.Affine(u, u, l.size, 0)
	return u
}

// reducedBack returns the gradient of A x.
func (p *pass) reducedBack(l *adapter, dy View) View {
	du := p.a.Alloc(p.dtype, 1, dy.Rows(), 1, l.a.w.Rows())
	p.ops.LinearDX(du, dy, l.b.w, false)
	p.ops.Affine(du, du, l.size, 0)
	return du
}

// dropped returns dropout(x), or x itself without dropout.
func (p *pass) dropped(l *adapter, x View) View {
	if p.tokens.IsZero() || l.rate == 0 {
		return x
	}
	y := p.a.Alloc(p.dtype, shape(x)...)
	p.drop(l, y, x)
	return y
}

// drop sets y to x with the same dropped elements in each pass of a step.
func (p *pass) drop(l *adapter, y, x View) {
	tokens := p.tokens.Slice(tensor.Seq, p.row, p.row+x.Rows())
	p.ops.Dropout(y, x, tokens, kernels.Dropout{P: l.rate, Key: p.b.Key ^ l.name})
}

// groupLinear does the work of linear for the pairs of experts, given x and its form of groupOperand. Their adapters
// drop nothing, as in PEFT.
func (p *pass) groupLinear(y View, x, from kernels.Operand, w *weight, pairs kernels.Pairs) {
	if w.scaled() {
		p.ops.GroupScaledLinear(y, from, w.codes, pairs)
	} else {
		p.ops.GroupLinear(y, x, w.w, pairs, false)
	}
	if l := w.lora; l != nil {
		defer p.a.Release(p.a.Mark())
		p.ops.GroupLinear(y, p.groupReduced(l, x, pairs), l.b.w, pairs, true)
	}
}

// groupLinearDX sets dx to the gradient of x, given dy and its form of groupGradient.
func (p *pass) groupLinearDX(dx View, dy, from kernels.Operand, w *weight, pairs kernels.Pairs) {
	if w.scaled() {
		p.ops.GroupScaledLinear(dx, from, kernels.Scaled{View: w.turned.View}, pairs)
	} else {
		p.ops.GroupLinearDX(dx, dy, w.w, pairs, false)
	}
	if l := w.lora; l != nil {
		defer p.a.Release(p.a.Mark())
		p.ops.GroupLinearDX(dx, p.groupReducedBack(l, dy, pairs), l.a.w, pairs, true)
	}
}

// groupLinearDW does the work of linearDW for the pairs of experts.
func (p *pass) groupLinearDW(w *weight, dy, x kernels.Operand, pairs kernels.Pairs) {
	if !w.g.IsZero() {
		p.ops.GroupLinearDW(w.g, dy, x, pairs, !w.fresh)
		w.fresh = false
	}
	l := w.lora
	if l == nil {
		return
	}
	defer p.a.Release(p.a.Mark())
	if !l.b.g.IsZero() {
		p.ops.GroupLinearDW(l.b.g, dy, p.groupReduced(l, x, pairs), pairs, true)
	}
	if !l.a.g.IsZero() {
		p.ops.GroupLinearDW(l.a.g, p.groupReducedBack(l, dy, pairs), x, pairs, true)
	}
}

// groupReduced returns scale * A x of each pair, [1, P, 1, r].
func (p *pass) groupReduced(l *adapter, x kernels.Operand, pairs kernels.Pairs) kernels.Operand {
	u := p.groupRank(l, pairs)
	p.ops.GroupLinear(u, x, l.a.w, pairs, false)
	p.ops.Affine(u, u, l.size, 0)
	return kernels.Operand{View: u}
}

// groupReducedBack returns the gradient of A x.
func (p *pass) groupReducedBack(l *adapter, dy kernels.Operand, pairs kernels.Pairs) kernels.Operand {
	du := p.groupRank(l, pairs)
	p.ops.GroupLinearDX(du, dy, l.b.w, pairs, false)
	p.ops.Affine(du, du, l.size, 0)
	return kernels.Operand{View: du}
}

func (p *pass) groupRank(l *adapter, pairs kernels.Pairs) View {
	return p.a.Alloc(p.dtype, 1, pairs.Tokens.Rows(), 1, l.b.w.Cols())
}
