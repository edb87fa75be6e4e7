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
