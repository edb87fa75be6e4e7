// Package call turns views and tiles into what the attention kernels of kernels/gpu/internal/source take as
// arguments. It launches nothing, so that the same call can go to a GPU or to a test without one.
package call

import (
	"unsafe"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto memory; see package tensor.
type View = tensor.View

// Tensors are those of a block of a pass; what a pass does not have is the zero View.
type Tensors struct {
	Q, K, V, DO, O, LSE, Delta, DQ, DK, DV View // as in package attention; O: the accumulator
}

// address returns where a view begins; of the zero View, NULL.
func address(v View) uint64 {
	if v.IsZero() {
		return 0
	}
	return uint64(uintptr(v.Memory().Ptr())) + uint64(v.Offset()*int64(v.DType().Size()))
}

// Strided returns a view as kernels have it; of the zero View, NULL.
func Strided(v View) source.Strided {
	return source.Strided{At: address(v), Batch: v.Stride(tensor.Batch), Seq: v.Stride(tensor.Seq),
		Head: v.Stride(tensor.Heads)}
}

// Length returns the extent of v along an axis as kernels have it.
func Length(v View, axis tensor.Axis) int32 { return int32(v.Len(axis)) }

// InPieces reports whether the rows of all views are made of pieces of n elements which begin at
// multiples of a piece. Views that are zero do not count.
func InPieces(n int, views ...View) bool {
	for _, v := range views {
		if v.IsZero() {
			continue
		}
		ok := v.Len(tensor.Dim)%n == 0 && address(v)%uint64(n*v.DType().Size()) == 0
		for a := tensor.Batch; a < tensor.Dim; a++ {
			ok = ok && (v.Len(a) == 1 || v.Stride(a)%int64(n) == 0)
		}
		if !ok {
			return false
		}
	}
	return true
}

// Words returns the words of the structs xs, which have nothing but those.
func Words[T any](xs []T) []uint32 {
	if len(xs) == 0 {
		return nil
	}
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(xs))), len(xs)*int(unsafe.Sizeof(xs[0])/4))
}

// Bound returns a bound of a band as the device has it: sums with indices do not overflow.
func Bound(x int) int32 { return int32(min(max(x, -1<<29), 1<<29)) }
