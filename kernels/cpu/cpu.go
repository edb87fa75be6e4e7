// Package cpu computes attention and the other operations of a model on the host, in float32 or float64. It converts
// bfloat16 and float16 to float32 as it reads them, and rounds results to the nearest, ties to even. Kernels queues the
// work on a stream:
//
//	k := cpu.New(stream)
//	k.RMSNorm(y, inv, x, w, 1e-5)
//
// The work is split over goroutines. The split does not depend on their number, so results have the same bits on any
// number of cores.
package cpu

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Kernels computes on the host. Its methods queue work on its stream and return at once. They check shapes and types
// first: passes of attention return an error (see attention.Kernel), and operations panic (see model.Ops).
type Kernels struct {
	attention.Launches
	stream  *tensor.HostStream
	level   simd.Level             // of the inner loops
	cores   int                    // available to this process when New ran
	scratch []*scratch             // one per worker; only work on the stream uses it, one piece at a time
	sums    []float64              // of operations, likewise
	slots   [halfSlots]tensor.View // float32 buffers of 16-bit operations

	forward  forwardPass // the current pass
	backward backwardPass
}

// New returns kernels that compute on stream, with the instructions that Use selected. The caller closes stream.
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
	forType(dst, add[float64], add[float32])(c, dst, src)
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
	dim, dn, sn := int64(dst.Len(tensor.Dim)), dst.Stride(tensor.Dim), src.Stride(tensor.Dim)
	c.heads("add", dst, src, func(_ *scratch, do, so int64) {
		if dn == 1 && sn == 1 {
			l.AddTo(d[do:do+dim], d[do:do+dim], s[so:so+dim])
			return
		}
		for i := range dim {
			d[do+i*dn] += s[so+i*sn]
		}
	})
}

// fillAny sets every element to x. x must be 0 unless the elements are float32 or float64.
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
		if x == zero { // -0 also, which becomes 0
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

// mustBeHere panics if onHost fails.
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

// level is the level of later calls of New.
var level = func() *atomic.Int64 {
	l := new(atomic.Int64)
	l.Store(int64(simd.Best()))
	return l
}()

// Use selects the instructions of later calls of New: generic (plain Go), avx2 (with FMA), avx512, or "" for the best
// that this machine supports. It fails for an unknown or unsupported name.
func Use(name string) error {
	l, err := simd.Parse(name)
	if err == nil {
		level.Store(int64(l))
	}
	return err
}

// Instructions returns the names of the selected instructions and of the best that this machine supports.
func Instructions() (used, best string) {
	return current().String(), simd.Best().String()
}

func current() simd.Level { return simd.Level(level.Load()) }

// ProductRate measures the GFLOP/s of one goroutine that multiplies n by n matrices of float32. It repeats the product
// for d and returns the fastest, since other processes may slow down some of them.
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
