package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// memory holds the elements of a view, of type T or of 16 bits. load converts 16-bit elements to float32, and store
// rounds them to the nearest, ties to even.
type memory[T tensor.Float] struct {
	data  []T
	half  []uint16 // instead of data
	dtype tensor.DType
}

// isHalf reports whether t is bfloat16 or float16.
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
func (m memory[T]) load(dst []T, at int) { m.loadRows(dst, at, 0, 1, len(dst)) }

// loadRows reads rows of n elements into dst, without gaps. The first row is at index at, and ld is their distance. All
// levels give the same bits. Rows are short, so the switch is outside of the loops.
func (m memory[T]) loadRows(dst []T, at, ld, rows, n int) {
	l := current()
	switch m.dtype {
	case tensor.BF16:
		for wide, r := any(dst).([]float32), 0; r < rows; r++ {
			l.FromBF16(wide[r*n:][:n], m.half[at+r*ld:][:n])
		}
	case tensor.F16:
		for wide, r := any(dst).([]float32), 0; r < rows; r++ {
			l.FromF16(wide[r*n:][:n], m.half[at+r*ld:][:n])
		}
	default:
		for r := range rows {
			copy(dst[r*n:][:n], m.data[at+r*ld:])
		}
	}
}

// store writes len(src) elements, the first at index at.
func (m memory[T]) store(at int, src []T) {
	switch m.dtype {
	case tensor.BF16:
		current().ToBF16(m.half[at:][:len(src)], any(src).([]float32))
	case tensor.F16:
		current().ToF16(m.half[at:][:len(src)], any(src).([]float32))
	default:
		copy(m.data[at:][:len(src)], src)
	}
}

// from returns the memory since index at.
func (m memory[T]) from(at int) memory[T] {
	if isHalf(m.dtype) {
		m.half = m.half[at:]
	} else {
		m.data = m.data[at:]
	}
	return m
}

// aligned returns s from its first full cache line; it drops fewer than pieceUnit elements.
func aligned[T tensor.Float](s []T) []T {
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(s))) % lineBytes)
	if off == 0 {
		return s
	}
	return s[(lineBytes-off)/int(unsafe.Sizeof(T(0))):]
}

// workers returns the number of goroutines that compute. It is at most the number of cores if the process is bound to
// some: GOMAXPROCS may then include a thread for communication.
func (c *Kernels) workers() int {
	n := runtime.GOMAXPROCS(0)
	if c.cores < runtime.NumCPU() {
		n = min(n, c.cores)
	}
	return n
}

// each runs f(0) ... f(n-1) on up to c.workers() goroutines and returns when all are done. Free workers take the next
// piece. No two pieces may write the same element, so that results do not depend on the order.
func (c *Kernels) each(n int, f func(i int)) {
	c.split(n, func(_ *scratch, i int) { f(i) })
}

// split does what each does and passes f the worker's scratch memory. Only work on the stream may call it, so one call
// at a time uses the scratch.
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
		wg.Go(func() { work(s) }) // ends after the last piece
	}
	work(c.scratch[0])
	wg.Wait()
}
