package cpu

import (
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// The operations of the model (internal/model.Ops) and of the optimizer. All compute in
// float32, or in float64 where every float view is float64, which makes the CPU an oracle for
// itself. Activations of 16 bits are converted by blocks; see ops_half.go. A fault of shape or
// type is a fault of the caller and panics before anything is queued; a fault of the data, such as
// a token outside the vocabulary, poisons the stream.

// opsScratch is memory kept between operations. Only work on the stream touches it, one
// piece at a time.
type opsScratch struct {
	f64 []float64
}

// grow is buf with n elements, whose values are left over from earlier use.
func grow[T any](buf *[]T, n int) []T {
	if cap(*buf) < n {
		*buf = make([]T, n)
	}
	return (*buf)[:n]
}

// queue queues work that cannot fail.
func (c *Kernels) queue(name string, run func()) {
	c.stream.Do(name, func() error { run(); return nil })
}

// blocks runs f over [0, n) in blocks of size elements. The blocks depend on n and size
// only, so that a sum made block by block does not depend on the number of goroutines.
func (c *Kernels) blocks(n, size int, f func(block, lo, hi int)) {
	c.each((n+size-1)/size, func(i int) { f(i, i*size, min(n, (i+1)*size)) })
}

// dense panics unless all views are dense and of type dtype, which is float32 or float64.
func dense(op string, dtype tensor.DType, vs ...tensor.View) {
	shape.Must(dtype == tensor.F32 || dtype == tensor.F64, op, vs...)
	for _, v := range vs {
		shape.Must(v.DType() == dtype && v.IsDense(), op, vs...)
	}
}

// denseActivations panics unless all views are dense and of one float type.
func denseActivations(op string, vs ...tensor.View) {
	if t := vs[0].DType(); !isHalf(t) {
		dense(op, t, vs...)
		return
	}
	denseHalves(op, vs...)
}

// denseHalves panics unless all views are dense and of one float type of 16 bits.
func denseHalves(op string, vs ...tensor.View) {
	for _, v := range vs {
		shape.Must(isHalf(v.DType()) && v.DType() == vs[0].DType() && v.IsDense(), op, vs...)
	}
}

const (
	elementBlock = 1 << 14 // elements of one piece of element-wise work
	rowWork      = 1 << 13 // elements of one piece of row-wise work
)

// rowBlock returns how many rows of n elements make one piece of work.
func rowBlock(n int) int { return max(1, rowWork/max(n, 1)) }
