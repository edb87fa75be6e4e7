package model

import (
	"slices"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/tensor"
)

// An operand of products with matrices of layers. With Options.Scaled it also has its forms in E4M3, as needed.
type operand struct {
	View
	byRow, byColumn kernels.Scaled
}

// operand returns x with its forms, in memory of the arena. Products of x with matrices need that by row, their
// gradients that by column.
func (p *pass) operand(x View, byRow, byColumn bool) operand {
	o := operand{View: x}
	if p.opt.Scaled {
		o.byRow, o.byColumn = p.quantize(x, byRow, byColumn)
	}
	return o
}

// gradient returns dy as an operand for the gradients of a product's input and matrix.
func (p *pass) gradient(dy View, w *weight) operand {
	return p.operand(dy, w.scaled(), w.scaled() && !w.g.IsZero())
}

// inputDW returns x as an operand for the gradients of matrices.
func (p *pass) inputDW(x View, ws ...*weight) operand {
	some := func(w *weight) bool { return w.scaled() && !w.g.IsZero() }
	return p.operand(x, false, slices.ContainsFunc(ws, some))
}

func (p *pass) quantize(x View, byRow, byColumn bool) (rows, columns kernels.Scaled) {
	if byRow {
		rows = p.scaled(x.Rows(), x.Cols())
	}
	if byColumn {
		columns = p.scaled(x.Cols(), int(roundUp(int64(x.Rows()), kernels.ScaledUnit)))
	}
	if byRow || byColumn {
		p.ops.Quantize(rows, columns, x)
	}
	return rows, columns
}

func (p *pass) scaled(rows, cols int) kernels.Scaled {
	return kernels.Scaled{View: p.a.Alloc(tensor.U8, 1, rows, 1, cols), Factors: p.a.Alloc(tensor.F32, 1, rows, 1, 1)}
}

// scale sets the forms of a layer's matrices, in memory of the arena: by row for a forward pass, by column for a
// backward pass.
func (p *pass) scale(l *layer, forward, backward bool) {
	if !p.opt.Scaled {
		return
	}
	for _, r := range hf.Scaled { // in this order on every rank
		if w := l.parts[r]; w != nil {
			w.byRow, w.byColumn = p.quantize(w.w, forward, backward)
		}
	}
}
