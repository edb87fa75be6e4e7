// Package shape checks the arguments of model operations on every device. A wrong shape or type is a bug of the caller,
// so Must panics before the operation queues work:
//
//	shape.Must(shape.SameShape(y, gate, up), "swiglu", y, gate, up)
package shape

import (
	"fmt"

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
