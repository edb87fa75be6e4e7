package comm

import (
	"fmt"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// combine folds src into acc. Both hold elements of one reducible type, aligned for it.
func combine(d tensor.DType, op Op, acc, src []byte) {
	switch d {
	case tensor.F32:
		fold(op, elements[float32](acc), elements[float32](src))
	case tensor.F64:
		fold(op, elements[float64](acc), elements[float64](src))
	case tensor.I64:
		fold(op, elements[int64](acc), elements[int64](src))
	case tensor.I32:
		fold(op, elements[int32](acc), elements[int32](src))
	default:
		panic(fmt.Sprintf("comm: reduction of %s", d))
	}
}

// combineAll sets dst to what the ranks' slots come to, in rank order. dst may be one of them: it is written
// block by block, each when all ranks' parts of it are in. A block stays in the first cache meanwhile.
func combineAll(d tensor.DType, op Op, dst []byte, ranks int, slot func(r int) []byte) {
	var words [512]uint64 // so that any element type is aligned
	block := unsafe.Slice((*byte)(unsafe.Pointer(&words)), unsafe.Sizeof(words))
	for lo := 0; lo < len(dst); lo += len(block) {
		hi := min(lo+len(block), len(dst))
		acc := block[:hi-lo]
		copy(acc, slot(0)[lo:])
		for r := 1; r < ranks; r++ {
			combine(d, op, acc, slot(r)[lo:hi])
		}
		copy(dst[lo:hi], acc)
	}
}

// fold relies on the language: min and max of a NaN are NaN, so that no NaN is lost.
func fold[T float32 | float64 | int64 | int32](op Op, acc, src []T) {
	src = src[:len(acc)]
	switch op {
	case Sum:
		for i, x := range src {
			acc[i] += x
		}
	case Max:
		for i, x := range src {
			acc[i] = max(acc[i], x)
		}
	case Min:
		for i, x := range src {
			acc[i] = min(acc[i], x)
		}
	}
}

// elements reads bytes as elements. Views and the group's scratch are aligned for any type.
func elements[T any](b []byte) []T {
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(zero)))
}

// scratchBytes is memory of the group for one call.
func (g *Group) scratchBytes(n int) []byte {
	if words := (n + 7) / 8; len(g.scratch) < words {
		g.scratch = make([]uint64, words)
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(g.scratch))), n)
}
