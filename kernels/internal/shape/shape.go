// Package shape checks what operations of the model are given, for every device alike: a fault
// of shape or type is a mistake of the caller, so it panics before anything is queued.
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

// SameShape reports whether all views have one shape.
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

// Wide returns how many neighbouring elements a copy between strided views of one shape and element type
// may move as one word of up to 8 bytes: 1, 2, 4 or 8. The rows of all must divide and lie that way.
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
