package cpu

import (
	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// The operations of the model (internal/model.Ops) and of the optimizer compute in float32, or in float64 if every
// float view is float64, as a reference for tests. ops_half.go converts 16-bit activations. A wrong shape or type
// panics before the operation queues work. Wrong data, such as a token outside the vocabulary, poisons the stream.

// grow returns buf with n elements of arbitrary value.
func grow[T any](buf *[]T, n int) []T {
	if cap(*buf) < n {
		*buf = make([]T, n)
	}
	return (*buf)[:n]
}

// forType returns the float64 version of a function if v is float64, otherwise the float32 version.
func forType[F any](v tensor.View, f64, f32 F) F {
	if v.DType() == tensor.F64 {
		return f64
	}
	return f32
}

// queue queues work that cannot fail.
func (c *Kernels) queue(name string, run func()) {
	c.stream.Do(name, func() error { run(); return nil })
}

// blocks runs f over [0, n) in blocks of size elements. The blocks do not depend on the number of goroutines, nor do
// sums over them.
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

// denseActivations panics unless all views are dense and have the same float type.
func denseActivations(op string, vs ...tensor.View) {
	if t := vs[0].DType(); !isHalf(t) {
		dense(op, t, vs...)
		return
	}
	denseHalves(op, vs...)
}

// denseHalves panics unless all views are dense and have the same 16-bit float type.
func denseHalves(op string, vs ...tensor.View) {
	for _, v := range vs {
		shape.Must(isHalf(v.DType()) && v.DType() == vs[0].DType() && v.IsDense(), op, vs...)
	}
}

const (
	elementBlock = 1 << 14 // elements of a piece of elementwise work
	rowWork      = 1 << 13 // elements of a piece of work on rows
)

// rowBlock returns the number of rows of n elements in a piece of work.
func rowBlock(n int) int { return max(1, rowWork/max(n, 1)) }

// Copy copies src to dst, which have the same shape and may be strided. It converts between float types and rounds to
// the nearest, ties to even; from float64 to 16 bits it rounds twice, first to float32.
func (c *Kernels) Copy(dst, src tensor.View) {
	shape.Must(shape.SameShape(dst, src), "copy", dst, src)
	if dst.DType() == src.DType() {
		mustBeHere("copy", dst, src)
		if !c.move(dst, src) {
			c.queue("copy", func() {
				c.each(dst.Rows(), func(r int) { tensor.Copy(rowOf(dst, r), rowOf(src, r)) })
			})
		}
		return
	}
	if c.convert(dst, src) {
		return
	}
	load, store := loader(src), storer(dst)
	shape.Must(load != nil && store != nil, "copy", dst, src)
	dim, dn, sn := int64(dst.Len(tensor.Dim)), dst.Stride(tensor.Dim), src.Stride(tensor.Dim)
	c.heads("copy", dst, src, func(_ *scratch, do, so int64) {
		for i := range dim {
			store(do+i*dn, load(so+i*sn))
		}
	})
}

// heads queues f for each head of dst and src, views of one shape, with the indices of the two heads.
func (c *Kernels) heads(name string, dst, src tensor.View, f func(s *scratch, do, so int64)) {
	heads, seq := dst.Len(tensor.Heads), dst.Len(tensor.Seq)
	c.queue(name, func() {
		c.split(dst.Rows(), func(s *scratch, r int) {
			for h := range heads {
				f(s, at(dst, r/seq, r%seq, h), at(src, r/seq, r%seq, h))
			}
		})
	})
}

// convert copies between float32 and a 16-bit type if elements of a head are contiguous, and returns false otherwise.
func (c *Kernels) convert(dst, src tensor.View) bool {
	l := c.level
	switch [2]tensor.DType{dst.DType(), src.DType()} {
	case [2]tensor.DType{tensor.BF16, tensor.F32}:
		return runs(c, dst, src, l.ToBF16)
	case [2]tensor.DType{tensor.F32, tensor.BF16}:
		return runs(c, dst, src, l.FromBF16)
	case [2]tensor.DType{tensor.F16, tensor.F32}:
		return runs(c, dst, src, l.ToF16)
	case [2]tensor.DType{tensor.F32, tensor.F16}:
		return runs(c, dst, src, l.FromF16)
	}
	return false
}

// move copies between equal types if elements of a head are contiguous, and returns false otherwise.
func (c *Kernels) move(dst, src tensor.View) bool {
	switch dst.DType().Size() {
	case 8:
		return runs(c, dst, src, moved[int64])
	case 4:
		return runs(c, dst, src, moved[int32])
	case 2:
		return runs(c, dst, src, moved[uint16])
	}
	return false
}

func moved[T any](dst, src []T) { copy(dst, src) }

// runs queues f for contiguous runs of elements in dst and src: pieces of dense views, heads, or rows with contiguous
// heads. It returns false if the elements of a head have gaps.
func runs[D, S tensor.Element](c *Kernels, dst, src tensor.View, f func(dst []D, src []S)) bool {
	ds, ss := tensor.Data[D](dst), tensor.Data[S](src)
	if dst.IsDense() && src.IsDense() {
		c.queue("copy", func() {
			c.blocks(len(ds), elementBlock, func(_, lo, hi int) { f(ds[lo:hi], ss[lo:hi]) })
		})
		return true
	}
	if dst.Stride(tensor.Dim) != 1 || src.Stride(tensor.Dim) != 1 || dst.Size() == 0 {
		return false
	}
	dim := int64(dst.Len(tensor.Dim))
	if dst.Stride(tensor.Heads) == dim && src.Stride(tensor.Heads) == dim {
		dim *= int64(dst.Len(tensor.Heads))
		dst, src = dst.Slice(tensor.Heads, 0, 1), src.Slice(tensor.Heads, 0, 1)
	}
	c.heads("copy", dst, src, func(_ *scratch, do, so int64) { f(ds[do:do+dim], ss[so:so+dim]) })
	return true
}

// rowOf returns row r of batch and seq together.
func rowOf(v tensor.View, r int) tensor.View {
	b, s := r/v.Len(tensor.Seq), r%v.Len(tensor.Seq)
	return v.Slice(tensor.Batch, b, b+1).Slice(tensor.Seq, s, s+1)
}

// loader returns a function that reads elements of v as float64, which is exact. It returns nil if v's type is no
// float.
func loader(v tensor.View) func(i int64) float64 {
	switch v.DType() {
	case tensor.F64:
		xs := tensor.Data[float64](v)
		return func(i int64) float64 { return xs[i] }
	case tensor.F32:
		xs := tensor.Data[float32](v)
		return func(i int64) float64 { return float64(xs[i]) }
	case tensor.BF16:
		xs := tensor.Data[uint16](v)
		return func(i int64) float64 { return float64(half.FromBF16(xs[i])) }
	case tensor.F16:
		xs := tensor.Data[uint16](v)
		return func(i int64) float64 { return float64(half.FromF16(xs[i])) }
	}
	return nil
}

// storer returns a function that writes elements of v, or nil if v's type is no float.
func storer(v tensor.View) func(i int64, x float64) {
	switch v.DType() {
	case tensor.F64:
		xs := tensor.Data[float64](v)
		return func(i int64, x float64) { xs[i] = x }
	case tensor.F32:
		xs := tensor.Data[float32](v)
		return func(i int64, x float64) { xs[i] = float32(x) }
	case tensor.BF16:
		xs := tensor.Data[uint16](v)
		return func(i int64, x float64) { xs[i] = half.ToBF16(float32(x)) }
	case tensor.F16:
		xs := tensor.Data[uint16](v)
		return func(i int64, x float64) { xs[i] = half.ToF16(float32(x)) }
	}
	return nil
}
