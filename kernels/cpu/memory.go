package cpu

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

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

// load reads len(dst) elements, the first at index at.
func (m memory[T]) load(dst []T, at int) {
	if !isHalf(m.dtype) {
		copy(dst, m.data[at:][:len(dst)])
		return
	}
	widen(any(dst).([]float32), m.half[at:][:len(dst)], m.dtype)
}

// loadRows reads rows of n elements, ld elements apart, the first at index at, side by side into dst.
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

// aligned returns s from its first whole cache line, less than pieceUnit elements away.
func aligned[T tensor.Float](s []T) []T {
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(s))) % lineBytes)
	if off == 0 {
		return s
	}
	return s[(lineBytes-off)/int(unsafe.Sizeof(T(0))):]
}

// workers returns how many goroutines compute at once. A process that keeps to fewer cores than it began with has a
// thread for messages, perhaps, but computes on no more goroutines than it has cores.
func (c *Kernels) workers() int {
	n := runtime.GOMAXPROCS(0)
	if c.cores < runtime.NumCPU() {
		n = min(n, c.cores)
	}
	return n
}

// each runs f(0) ... f(n-1) on up to so many goroutines as workers says, and returns when all are done.
// Pieces are handed out as workers come free; for results that do not depend on who does
// what, no two pieces may write the same element.
func (c *Kernels) each(n int, f func(i int)) {
	c.split(n, func(_ *scratch, i int) { f(i) })
}

// split returns each with the scratch memory of the worker. Only work on the stream calls it,
// so one call at a time uses the scratch.
func (c *Kernels) split(n int, f func(s *scratch, i int)) {
	workers := max(1, min(n, c.workers()))
	for len(c.scratch) < workers {
		c.scratch = append(c.scratch, new(scratch))
	}
	var next atomic.Int64
	work := func(s *scratch) {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			f(s, i)
		}
	}
	var wg sync.WaitGroup
	for _, s := range c.scratch[1:workers] {
		wg.Go(func() { work(s) }) // ends when the pieces are used up; Wait below waits for it
	}
	work(c.scratch[0])
	wg.Wait()
}
