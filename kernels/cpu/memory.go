package cpu

import (
	"fmt"

	"github.com/cprun/cprun/tensor"
)

// A memory is the elements of a view: of T, which is computed in, or of 16 bits. Those become float32 as they are
// read, each exactly, and are rounded to the nearest, ties to even, as they are written.
type memory[T tensor.Float] struct {
	data  []T
	half  []uint16 // in place of data
	dtype tensor.DType
}

// isHalf reports whether t is one of the floats of 16 bits.
func isHalf(t tensor.DType) bool { return t == tensor.BF16 || t == tensor.F16 }

func memoryOf[T tensor.Float](v tensor.View) memory[T] {
	m := memory[T]{dtype: v.DType()}
	if isHalf(m.dtype) {
		m.half = tensor.Data[uint16](v)
	} else {
		m.data = tensor.Data[T](v)
	}
	return m
}

// load reads len(dst) elements from element at on.
func (m memory[T]) load(dst []T, at int) {
	if !isHalf(m.dtype) {
		copy(dst, m.data[at:][:len(dst)])
		return
	}
	widen(any(dst).([]float32), m.half[at:][:len(dst)], m.dtype)
}

// loadRows reads rows of n elements, which begin ld elements apart from element at on, side by side into dst.
func (m memory[T]) loadRows(dst []T, at, ld, rows, n int) {
	if isHalf(m.dtype) && rows > 0 {
		widenRows(any(dst).([]float32), m.half[at:], ld, rows, n, m.dtype)
		return
	}
	for r := range rows {
		copy(dst[r*n:][:n], m.data[at+r*ld:])
	}
}

// store writes len(src) elements from element at on.
func (m memory[T]) store(at int, src []T) {
	if !isHalf(m.dtype) {
		copy(m.data[at:][:len(src)], src)
		return
	}
	round(m.half[at:][:len(src)], any(src).([]float32), m.dtype)
}

// widen sets dst to src, as many floats of 16 bits. Conversions give the same bits at every level.
func widen(dst []float32, src []uint16, t tensor.DType) { widenRows(dst, src, 0, 1, len(dst), t) }

// widenRows sets dst to rows of n floats of 16 bits that begin ld apart. Rows are short, so what goes before one is
// kept out of the loop.
func widenRows(dst []float32, src []uint16, ld, rows, n int, t tensor.DType) {
	l := current()
	switch t {
	case tensor.BF16:
		for r := range rows {
			l.FromBF16(dst[r*n:][:n], src[r*ld:][:n])
		}
	case tensor.F16:
		for r := range rows {
			l.FromF16(dst[r*n:][:n], src[r*ld:][:n])
		}
	default:
		panic(fmt.Sprintf("kernels: %v is no float of 16 bits", t))
	}
}

// round sets dst to src, as many floats of 16 bits.
func round(dst []uint16, src []float32, t tensor.DType) {
	switch t {
	case tensor.BF16:
		current().ToBF16(dst, src)
	case tensor.F16:
		current().ToF16(dst, src)
	default:
		panic(fmt.Sprintf("kernels: %v is no float of 16 bits", t))
	}
}
