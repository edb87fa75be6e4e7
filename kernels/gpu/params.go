//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/tensor"
)

// length returns the extent of v along an axis as kernels have it.
func length(v View, axis tensor.Axis) int32 { return call.Length(v, axis) }

func ceilDiv(n, of int) int { return (n + of - 1) / of }

// cInt returns a truth value of C.
func cInt(b bool) int32 {
	if b {
		return 1
	}
	return 0
}
