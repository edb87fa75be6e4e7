//go:build cuda

package kernels

import (
	"fmt"

	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
)

// Copy copies src to dst, of one shape, converting between float types: rounded to the nearest,
// ties to even, float64 to a 16-bit type by way of float32. Views may be strided.
func (c *CUDA) Copy(dst, src View) {
	must(sameShape(dst, src), "copy", dst, src)
	same, flatly := dst.DType() == src.DType(), dst.IsDense() && src.IsDense()
	to, of := typeNames[dst.DType()], typeNames[src.DType()]
	must(same || to != "" && of != "", "copy", dst, src)
	c.stream.Do("copy", func() error {
		switch {
		case same && flatly:
			c.stream.Copy(cuda.Addr(dst), cuda.Addr(src), int64(dst.Size())*int64(dst.DType().Size()))
			return nil
		case same:
			return c.strided(fmt.Sprintf("move_strided_%d", dst.DType().Size()), dst, src)
		case flatly:
			return c.pairwise("copy_"+to+"_"+of, dst, src)
		}
		return c.strided("copy_strided_"+to+"_"+of, dst, src)
	})
}

// Add adds src to dst, of one shape: views of one float type, or a 16-bit src to a float32 dst.
func (c *CUDA) Add(dst, src View) error {
	t, s := dst.DType(), src.DType()
	wide := t == tensor.F32 && (s == tensor.BF16 || s == tensor.F16)
	if dst.Shape() != src.Shape() || !wide && (t != s || t != tensor.F32 && t != tensor.BF16 && t != tensor.F16) {
		return fmt.Errorf("add %v to %v: shapes must be equal, and types float32 or 16-bit floats, equal or to float32", src, dst)
	}
	name := typeNames[t] + "_" + typeNames[s]
	c.stream.Do("add", func() error {
		if dst.IsDense() && src.IsDense() {
			return c.pairwise("add_"+name, dst, src)
		}
		return c.strided("add_strided_"+name, dst, src)
	})
	return nil
}

// Zero sets views of any element type to 0.
func (c *CUDA) Zero(vs ...View) error {
	for _, v := range vs {
		c.stream.Do("zero", func() error {
			if v.IsDense() {
				c.stream.Memset(cuda.Addr(v), 0, int64(v.Size())*int64(v.DType().Size()))
				return nil
			}
			return c.strided(fmt.Sprintf("move_strided_%d", v.DType().Size()), v, View{})
		})
	}
	return nil
}

// pairwise queues a flat kernel of ops_copy.cu over dense views of one size.
func (c *CUDA) pairwise(name string, dst, src View) error {
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
func (c *CUDA) strided(name string, dst, src View) error {
	args := new(cuda.Args).View(dst).View(src)
	// Struct Layout is aligned to eight bytes; so is what stands before it.
	for _, n := range dst.Shape() {
		args.Int(n)
	}
	for _, strides := range [][4]int64{dst.Strides(), src.Strides()} {
		for _, n := range strides {
			args.Int64(n)
		}
	}
	n := dst.Size()
	return c.launch("ops_copy", name, cuda.Dim{X: ceilDiv(n, flatThreads)}, cuda.Dim{X: flatThreads}, args.Int64(int64(n)))
}
