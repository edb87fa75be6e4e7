package model

import (
	"slices"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// An operand of products with matrices of layers, with its forms in E4M3 as needed.
type operand struct {
	View
	byRow, byColumn kernels.Scaled
}

// operand returns x for products with some matrices. Forms in E4M3 are in memory of the arena.
func (p *pass) operand(x View, ws ...*weight) operand {
	return p.quantize(x, slices.ContainsFunc(ws, (*weight).scaled), false, View{})
}

// gradient returns dy for the gradients of a product's matrix and, with dx, of its input. The latter needs dy times the
// factors of the matrix, since the other operand has its codes alone.
func (p *pass) gradient(dy View, w *weight, dx bool) operand {
	return p.quantize(dy, dx && w.scaled(), w.scaled() && !w.g.IsZero(), w.codes.Factors)
}

// inputDW returns x for the gradients of matrices.
func (p *pass) inputDW(x View, ws ...*weight) operand {
	some := func(w *weight) bool { return w.scaled() && !w.g.IsZero() }
	return p.quantize(x, false, slices.ContainsFunc(ws, some), View{})
}

func (p *pass) quantize(x View, byRow, byColumn bool, by View) operand {
	o := operand{View: x}
	if byRow {
		o.byRow = p.scaled(x.Rows(), x.Cols())
	} else {
		by = View{}
	}
	if byColumn {
		o.byColumn = p.scaled(x.Cols(), int(roundUp(int64(x.Rows()), kernels.ScaledUnit)))
	}
	if byRow || byColumn {
		p.ops.Quantize(o.byRow, o.byColumn, x, by)
	}
	return o
}

func (p *pass) scaled(rows, cols int) kernels.Scaled {
	return kernels.Scaled{View: p.a.Alloc(tensor.U8, 1, rows, 1, cols), Factors: p.a.Alloc(tensor.F32, 1, rows, 1, 1)}
}

// transpose sets the transposed codes of a layer's matrices, for the gradients of inputs, in memory of the arena.
func (p *pass) transpose(l *layer) {
	var list []*weight
	widest := 0
	for _, r := range hf.Scaled { // in this order on every rank
		if w := l.at(r); w.scaled() {
			list, widest = append(list, w), max(widest, w.codes.Cols())
		}
	}
	if widest == 0 {
		return
	}
	ones := p.fillOnes(p.a.Alloc(tensor.F32, 1, widest, 1, 1))
	for _, w := range list {
		rows, cols := w.codes.Rows(), w.codes.Cols()
		w.turned = kernels.Scaled{View: p.a.Alloc(tensor.U8, 1, cols, 1, rows), Factors: ones.Slice(tensor.Seq, 0, cols)}
		p.ops.Transpose(w.turned.View, w.codes.View)
	}
}

// groupOperand returns the operands of the product of x with a matrix of experts, in memory of the arena if the matrix
// is scaled.
func (p *pass) groupOperand(x kernels.Operand, w *weight) (kernels.Operand, kernels.Scaled) {
	if !w.scaled() {
		return x, kernels.Scaled{View: w.w}
	}
	s := p.quantize(x.View, true, false, View{}).byRow
	return kernels.Operand{View: s.View, Factors: s.Factors, ByToken: x.ByToken}, w.codes
}

// groupGradient returns the operands of the gradient of x: with a scaled matrix, dy times its factors, and its codes
// transposed.
func (p *pass) groupGradient(dy kernels.Operand, w *weight, pairs kernels.Pairs) (kernels.Operand, kernels.Scaled) {
	if !w.scaled() {
		return dy, kernels.Scaled{View: w.w}
	}
	s := p.scaled(pairs.Tokens.Rows(), dy.Cols())
	p.ops.GroupQuantize(s, dy, w.codes.Factors, pairs)
	return kernels.Operand{View: s.View, Factors: s.Factors}, kernels.Scaled{View: w.turned.View}
}
