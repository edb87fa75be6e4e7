//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Copy copies src to dst, of one shape, converting between float types: rounded to the nearest,
// ties to even, float64 to a 16-bit type by way of float32. Views may be strided.
func (c *Ops) Copy(dst, src View) {
	shape.Must(shape.SameShape(dst, src), "copy", dst, src)
	same, flatly := dst.DType() == src.DType(), dst.IsDense() && src.IsDense()
	to, of := typeNames[dst.DType()], typeNames[src.DType()]
	shape.Must(same || to != "" && of != "", "copy", dst, src)
	c.stream.Do("copy", func() error {
		switch {
		case same && flatly:
			c.stream.Copy(cuda.Addr(dst), cuda.Addr(src), int64(dst.Size())*int64(dst.DType().Size()))
			return nil
		case same:
			wide := shape.Wide(dst, src)
			return c.stridedBy(wide, fmt.Sprintf("move_strided_%d", wide*dst.DType().Size()), dst, src)
		case flatly:
			return c.pairwise("copy_"+to+"_"+of, dst, src)
		}
		return c.strided("copy_strided_"+to+"_"+of, dst, src)
	})
}

// Add adds src to dst, of one shape: views of one float type, or a 16-bit src to a float32 dst.
func (c *Ops) Add(dst, src View) {
	t, s := dst.DType(), src.DType()
	half := s == tensor.BF16 || s == tensor.F16
	shape.Must(shape.SameShape(dst, src) && (t == tensor.F32 && (s == tensor.F32 || half) || half && t == s), "add",
		dst, src)
	name := typeNames[t] + "_" + typeNames[s]
	c.stream.Do("add", func() error {
		if dst.IsDense() && src.IsDense() {
			return c.pairwise("add_"+name, dst, src)
		}
		return c.strided("add_strided_"+name, dst, src)
	})
}

// Zero sets views of any element type to 0.
func (c *Ops) Zero(vs ...View) {
	for _, v := range vs {
		c.stream.Do("zero", func() error {
			if v.IsDense() {
				c.stream.Memset(cuda.Addr(v), 0, int64(v.Size())*int64(v.DType().Size()))
				return nil
			}
			return c.strided(fmt.Sprintf("move_strided_%d", v.DType().Size()), v, View{})
		})
	}
}

// pairwise queues a flat kernel of ops_copy.cu over dense views of one size.
func (c *Ops) pairwise(name string, dst, src View) error {
	lanes := 4
	if dst.DType().Size() == 2 && src.DType().Size() == 2 {
		lanes = 8
	}
	k := flat{program: "ops_copy", name: name, any: name + "_any", lanes: lanes, vectors: 4}
	vectors := dst.DType() != tensor.F64 && src.DType() != tensor.F64 && aligned16(dst, src)
	return c.flat(k, dst.Size(), vectors, func(lo, n int) *cuda.Args {
		return new(cuda.Args).Addr(elementOf(dst, lo)).Addr(elementOf(src, lo)).Int64(int64(n))
	})
}

// strided queues a kernel of ops_copy.cu with an element a thread; src may be the zero View.
func (c *Ops) strided(name string, dst, src View) error { return c.stridedBy(1, name, dst, src) }

// stridedBy is strided with so many neighbouring elements as one.
func (c *Ops) stridedBy(wide int, name string, dst, src View) error {
	n, layout := dst.Size()/wide, source.Layout{Dst: dst.Strides(), Src: src.Strides()}
	for axis := range layout.Shape {
		layout.Shape[axis] = length(dst, tensor.Axis(axis))
	}
	layout.Shape[tensor.Dim] /= int32(wide)
	for axis := tensor.Batch; axis < tensor.Dim; axis++ {
		layout.Dst[axis] /= int64(wide)
		layout.Src[axis] /= int64(wide)
	}
	args := cuda.Struct(new(cuda.Args).View(dst).View(src), &layout).Int64(int64(n))
	return c.launch("ops_copy", name, cuda.Dim{X: ceilDiv(n, flatThreads)}, cuda.Dim{X: flatThreads}, args)
}
