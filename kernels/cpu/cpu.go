// Package cpu computes attention and the operations of a model on the host, in float32 or float64;
// views of bfloat16 and float16 are read as float32, and rounded to the nearest, ties to even, as they are written.
// Work is queued on a stream and split over goroutines in pieces that do not depend on their
// number, so that results are the same bits on any machine.
package cpu

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Kernels computes on the host. Its methods queue work on its stream and return at once. Faults of
// shape or type are found before anything is queued: a pass of attention returns them, as
// attention.Kernel has it, and an operation panics, as model.Ops has it.
type Kernels struct {
	stream  *tensor.HostStream
	level   simd.Level // of the inner loops
	cores   int        // that this process may use by now
	scratch []*scratch // one a worker; only work on the stream touches it, one piece at a time
	ops     opsScratch
	slots   [halfSlots]tensor.View // float32, of operations on 16 bits

	forward  forwardPass // the pass under way
	backward backwardPass
}

// New returns kernels that compute on stream, which the caller closes, with the instructions of Use.
func New(stream *tensor.HostStream) *Kernels {
	return &Kernels{stream: stream, level: current(), cores: ownCores()}
}

// Stream returns the stream that the work is queued on.
func (c *Kernels) Stream() *tensor.HostStream { return c.stream }

// Zero sets views of any element type to 0.
func (c *Kernels) Zero(vs ...tensor.View) {
	mustBeHere("zero", vs...)
	for _, v := range vs {
		c.queue("zero", func() { fillAny(v, 0) })
	}
}

// Add adds src to dst, element by element, of one shape: views of one float type, or a 16-bit src to a float32 dst.
func (c *Kernels) Add(dst, src tensor.View) {
	if isHalf(src.DType()) {
		c.halfAdd(dst, src)
		return
	}
	mustBeHere("add", dst, src)
	t := dst.DType()
	shape.Must(shape.SameShape(dst, src) && src.DType() == t && (t == tensor.F32 || t == tensor.F64), "add", dst, src)
	if t == tensor.F64 {
		add[float64](c, dst, src)
		return
	}
	add[float32](c, dst, src)
}

func add[T tensor.Float](c *Kernels, dst, src tensor.View) {
	if dst.Size() == 0 {
		return
	}
	l, d, s := simd.LoopsOf[T](c.level), tensor.Data[T](dst), tensor.Data[T](src)
	if dst.IsDense() && src.IsDense() {
		c.queue("add", func() {
			c.blocks(len(d), elementBlock, func(_, lo, hi int) { l.AddTo(d[lo:hi], d[lo:hi], s[lo:hi]) })
		})
		return
	}
	heads, dim := dst.Len(tensor.Heads), int64(dst.Len(tensor.Dim))
	seq, dn, sn := dst.Len(tensor.Seq), dst.Stride(tensor.Dim), src.Stride(tensor.Dim)
	c.queue("add", func() {
		c.each(dst.Rows(), func(row int) {
			for h := range heads {
				do, so := at(dst, row/seq, row%seq, h), at(src, row/seq, row%seq, h)
				if dn == 1 && sn == 1 {
					l.AddTo(d[do:do+dim], d[do:do+dim], s[so:so+dim])
					continue
				}
				for i := range dim {
					d[do+i*dn] += s[so+i*sn]
				}
			}
		})
	})
}

// fillAny sets every element to x, which is 0 where the elements are not floats.
func fillAny(v tensor.View, x float64) {
	switch v.DType() {
	case tensor.F64:
		fill(v, x)
	case tensor.F32:
		fill(v, float32(x))
	case tensor.F16, tensor.BF16:
		fill(v, uint16(0))
	case tensor.I64:
		fill(v, int64(0))
	case tensor.I32:
		fill(v, int32(0))
	case tensor.U8:
		fill(v, uint8(0))
	}
}

func fill[T tensor.Element](v tensor.View, x T) {
	if v.Size() == 0 {
		return
	}
	data := tensor.Data[T](v)
	if v.IsDense() {
		var zero T
		if x == zero { // -0 too, which becomes 0
			clear(data)
			return
		}
		for i := range data {
			data[i] = x
		}
		return
	}
	n, stride := int64(v.Len(tensor.Dim)), v.Stride(tensor.Dim)
	for b := range v.Len(tensor.Batch) {
		for s := range v.Len(tensor.Seq) {
			for h := range v.Len(tensor.Heads) {
				o := at(v, b, s, h)
				for i := range n {
					data[o+i*stride] = x
				}
			}
		}
	}
}

// at returns the index, in tensor.Data, of the first element of [b, s, h].
func at(v tensor.View, b, s, h int) int64 {
	return int64(b)*v.Stride(tensor.Batch) + int64(s)*v.Stride(tensor.Seq) + int64(h)*v.Stride(tensor.Heads)
}

// mustBeHere panics where onHost has an error.
func mustBeHere(what string, vs ...tensor.View) {
	if err := onHost(what, vs...); err != nil {
		panic("kernels: " + err.Error())
	}
}

// onHost returns an error that names the first view that this process cannot read.
func onHost(what string, vs ...tensor.View) error {
	for _, v := range vs {
		if v.IsZero() {
			return fmt.Errorf("%s: a view without memory", what)
		}
		if _, ok := v.Memory().(*tensor.Host); !ok {
			return fmt.Errorf("%s: %v is not host memory", what, v)
		}
	}
	return nil
}

// level selects the instructions of kernels made from now on.
var level = func() *atomic.Int64 {
	l := new(atomic.Int64)
	l.Store(int64(simd.Best()))
	return l
}()

// Use sets the instructions of the kernels that New makes from now on: generic (plain Go), avx2 (with FMA) or avx512;
// "" stands for the best that this machine has. It returns an error for what there is not, here or anywhere.
func Use(name string) error {
	l, err := simd.Parse(name)
	if err == nil {
		level.Store(int64(l))
	}
	return err
}

// Instructions returns the name of what kernels compute with, and of the best that this machine has.
func Instructions() (used, best string) {
	return current().String(), simd.Best().String()
}

func current() simd.Level { return simd.Level(level.Load()) }

// ProductRate returns the floating point operations per nanosecond, GFLOP/s, of one goroutine that multiplies n by n
// matrices of float32, at its fastest within d: long enough that a busy machine has a quiet moment in it.
func ProductRate(n int, d time.Duration) float64 {
	a, b, c := make([]float32, n*n), make([]float32, n*n), make([]float32, n*n)
	square := func(x []float32) factor[float32] { return factor[float32]{memory: memory[float32]{data: x}, ld: n} }
	for i := range a {
		a[i], b[i] = float32(i%7)-3, float32(i%5)-2
	}
	p := product[float32]{
		m: n, n: n, k: n, loops: simd.LoopsOf[float32](current()), left: square(a), right: square(b),
		out: memory[float32]{data: c},
	}
	best, s := time.Duration(1<<62), new(scratch)
	for began := time.Now(); time.Since(began) < d; {
		start := time.Now()
		p.compute(s, 0, 0, n, n)
		best = min(best, max(time.Since(start), 1))
	}
	return 2 * float64(n) * float64(n) * float64(n) / float64(best)
}
