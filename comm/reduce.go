package comm

import (
	"fmt"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// combine folds srcs into acc, one after the other. All hold elements of one reducible type, aligned for it.
func combine(d tensor.DType, op Op, acc []byte, srcs ...[]byte) {
	switch d {
	case tensor.F32:
		foldAll[float32](op, acc, srcs)
	case tensor.F64:
		foldAll[float64](op, acc, srcs)
	case tensor.I64:
		foldAll[int64](op, acc, srcs)
	case tensor.I32:
		foldAll[int32](op, acc, srcs)
	default:
		panic(fmt.Sprintf("comm: reduction of %s", d))
	}
}

// combineAll sets dst to what the ranks' slots come to, in rank order. dst may be one of them: it is written
// block by block, each when all ranks' parts of it are in. A block stays in the first cache meanwhile.
func combineAll(d tensor.DType, op Op, dst []byte, ranks int, slot func(r int) []byte) {
	var words [512]uint64 // so that any element type is aligned
	block := unsafe.Slice((*byte)(unsafe.Pointer(&words)), unsafe.Sizeof(words))
	var beside [together][]byte
	for lo := 0; lo < len(dst); lo += len(block) {
		hi := min(lo+len(block), len(dst))
		acc := block[:hi-lo]
		copy(acc, slot(0)[lo:])
		for r := 1; r < ranks; r += len(beside) {
			n := min(len(beside), ranks-r)
			for i := range n {
				beside[i] = slot(r + i)[lo:hi]
			}
			combine(d, op, acc, beside[:n]...)
		}
		copy(dst[lo:hi], acc)
	}
}

// together is how many ranks' elements are added at once. What is written of a sum and read again takes longer than
// adding.
const together = 3

func foldAll[T float32 | float64 | int64 | int32](op Op, acc []byte, srcs [][]byte) {
	to := elements[T](acc)
	for ; op == Sum && len(srcs) >= together; srcs = srcs[together:] {
		a, b, c := elements[T](srcs[0])[:len(to)], elements[T](srcs[1])[:len(to)], elements[T](srcs[2])[:len(to)]
		for i, x := range to {
			to[i] = x + a[i] + b[i] + c[i] // in this order, as one by one
		}
	}
	for _, src := range srcs {
		fold(op, to, elements[T](src))
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
