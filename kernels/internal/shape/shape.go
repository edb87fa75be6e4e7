// Package shape checks the arguments of model operations on every device. A wrong shape or type is a bug of the caller,
// so Must panics before the operation queues work:
//
//	shape.Must(shape.SameShape(y, gate, up), "swiglu", y, gate, up)
package shape

import (
	"fmt"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// Must panics unless ok, with every view in the message.
func Must(ok bool, op string, vs ...View) {
	if !ok {
		panic(fmt.Sprintf("kernels: %s: the shapes or types of %v do not fit together", op, vs))
	}
}

// SameShape reports whether all views have the same shape.
func SameShape(vs ...View) bool {
	for _, v := range vs {
		if v.Shape() != vs[0].Shape() {
			return false
		}
	}
	return true
}

// RowsOver returns the number of rows of v over its last axis.
func RowsOver(v View) int { return v.Rows() * v.Len(tensor.Heads) }

// Wide returns the number of neighbouring elements, 1, 2, 4 or 8, that a copy between strided views may move as one
// word of up to 8 bytes. The views have the same shape and element type; lengths and strides must be multiples.
func Wide(vs ...View) int {
	n := 1
	for 2*n*vs[0].DType().Size() <= 8 && fits(2*n, vs) {
		n *= 2
	}
	return n
}

func fits(n int, vs []View) bool {
	for _, v := range vs {
		if v.Len(tensor.Dim)%n != 0 || v.Len(tensor.Dim) > 1 && v.Stride(tensor.Dim) != 1 || v.Offset()%int64(n) != 0 {
			return false
		}
		for _, a := range []tensor.Axis{tensor.Batch, tensor.Seq, tensor.Heads} {
			if v.Len(a) > 1 && v.Stride(a)%int64(n) != 0 {
				return false
			}
		}
	}
	return true
}

// ConvWidth is the largest width of a convolution.
const ConvWidth = 8

// Conv panics unless xs [batch, seq, 1, n] have the same shape and type, and before, the shape of w and the segments
// match them: see Conv of model.Ops.
func Conv(op string, before, w View, segments []partition.Range, xs ...View) {
	x, all := xs[0], append([]View{before, w}, xs...)
	n, width := x.Len(tensor.Dim), w.Len(tensor.Dim)
	Must(SameShape(xs...) && x.Len(tensor.Heads) == 1 && 2 <= width && width <= ConvWidth &&
		w.Shape() == [4]int{1, n, 1, width} &&
		before.Shape() == [4]int{len(segments) * x.Len(tensor.Batch), width - 1, 1, n}, op, all...)
	for _, v := range append(xs, before) {
		Must(v.DType() == x.DType() && (n <= 1 || v.Stride(tensor.Dim) == 1), op, all...)
	}
	for _, s := range segments {
		if s.Lo < 0 || s.Hi <= s.Lo || s.Hi > x.Len(tensor.Seq) {
			panic(fmt.Sprintf("kernels: %s: segment [%d, %d) of %d rows", op, s.Lo, s.Hi, x.Len(tensor.Seq)))
		}
	}
}

// Gates panics unless xs have the same shape, and vectors an element for each of their columns.
func Gates(op string, vectors []View, xs ...View) {
	for _, v := range vectors {
		Must(SameShape(xs...) && v.Size() == xs[0].Cols(), op, append(vectors, xs...)...)
	}
}

// Quantize panics unless the others match x: see Quantize of model.Ops.
func Quantize(op string, byRow, byColumn kernels.Scaled, x, by View) {
	rows, cols := x.Rows(), x.Cols()
	padded := (rows + kernels.ScaledUnit - 1) / kernels.ScaledUnit * kernels.ScaledUnit
	Must(byRow.IsZero() || isScaled(byRow, rows, cols), op, x, byRow.View, byRow.Factors)
	Must(byColumn.IsZero() || isScaled(byColumn, cols, padded), op, x, byColumn.View, byColumn.Factors)
	Must(byRow.Least.IsZero() || isFloats(byRow.Least, rows), op, x, byRow.Least)
	Must(byColumn.Least.IsZero() && (by.IsZero() || !byRow.IsZero() && isFloats(by, cols)), op, x, by)
}

// Transpose panics unless dst has the shape of src transposed: see Transpose of model.Ops.
func Transpose(op string, dst, src View) {
	rows, cols := src.Rows(), src.Cols()
	Must(rows%kernels.ScaledUnit == 0 && cols%kernels.ScaledUnit == 0 && dst.Rows() == cols && dst.Cols() == rows &&
		dst.DType() == tensor.U8 && src.DType() == tensor.U8 && dst.IsDense() && src.IsDense(), op, dst, src)
}

// ScaledLinear panics unless y and the operands match: see ScaledLinear of model.Ops.
func ScaledLinear(op string, y View, a, b kernels.Scaled, add View) {
	Must(y.Cols()%kernels.ScaledUnit == 0 && a.Cols()%kernels.ScaledUnit == 0 && isScaled(a, y.Rows(), a.Cols()) &&
		isScaled(b, y.Cols(), a.Cols()), op, y, a.View, a.Factors, b.View, b.Factors)
	Must(add.IsZero() || add.Rows() == y.Rows() && add.Cols() == y.Cols(), op, y, add)
}

// GroupQuantize panics unless to and by match x, of places, and the experts: see GroupQuantize of model.Ops.
func GroupQuantize(op string, to kernels.Scaled, x, by View, p kernels.Pairs) {
	Must(isScaled(to, p.Tokens.Size(), x.Cols()) && x.Cols()%kernels.ScaledUnit == 0 && by.IsDense() &&
		by.DType() == tensor.F32 && by.Size() == (p.Starts.Size()-1)*x.Cols(), op, to.View, to.Factors, x, by, p.Starts)
}

// GroupScaledLinear panics unless y and the operands match: see GroupScaledLinear of model.Ops.
func GroupScaledLinear(op string, y View, a kernels.Operand, b kernels.Scaled, p kernels.Pairs) {
	rows, experts := p.Tokens.Size(), p.Starts.Size()-1
	if a.ByToken {
		rows = p.Places.Rows()
	}
	Must(y.Rows() == p.Tokens.Size() && y.Cols()%kernels.ScaledUnit == 0 && a.Cols()%kernels.ScaledUnit == 0 &&
		isScaled(kernels.Scaled{View: a.View, Factors: a.Factors}, rows, a.Cols()) &&
		(isScaled(b, experts*y.Cols(), a.Cols()) ||
			b.Factors.IsZero() && isCodes(b.View, y.Cols(), experts*a.Cols())),
		op, y, a.View, a.Factors, b.View, b.Factors, p.Starts)
}

// isScaled reports whether s has this shape, dense, and a factor for each row.
func isScaled(s kernels.Scaled, rows, cols int) bool {
	return isCodes(s.View, rows, cols) && !s.Factors.IsZero() && isFloats(s.Factors, rows)
}

func isCodes(v View, rows, cols int) bool {
	return v.Rows() == rows && v.Cols() == cols && v.DType() == tensor.U8 && v.IsDense()
}

func isFloats(v View, n int) bool { return v.Size() == n && v.DType() == tensor.F32 && v.IsDense() }
