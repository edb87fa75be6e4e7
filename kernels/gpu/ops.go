//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// The operations of the model (internal/model.Ops) and of the optimizer on a GPU, except for matrix products.
// Activations are float32, bfloat16 or float16; parameters, norms and their gradients are float32. All compute in
// float32. A wrong shape or type panics before the operation queues work, as on the CPU. The order of sums depends only
// on shapes and the GPU, so that every run gives the same bits.

// A blocksKey is a kernel and the number of threads of its blocks.
type blocksKey struct {
	f       *cuda.Function
	threads int
}

// Preload loads the programs of the operations, except those of E4M3, and compiles missing ones in parallel. The first
// use of a program loads it otherwise.
func (c *Ops) Preload() error {
	return c.loader.Preload("gemm_simple", "ops_copy", "ops_embed", "ops_loss", "ops_norm", "ops_optim", "ops_rope",
		"ops_glu", "ops_experts", "ops_group", "ops_conv")
}

// launch queues a kernel without dynamic shared memory.
func (c *Ops) launch(program, name string, grid, block cuda.Dim, args *cuda.Args) error {
	f, err := c.loader.Function(program, name, 0)
	if err != nil {
		return err
	}
	c.stream.Launch(f, cuda.Launch{Grid: grid, Block: block}, args)
	return nil
}

// resident returns the number of blocks that the GPU runs at once: the grid of kernels whose blocks loop over rows.
func (c *Ops) resident(program, name string, threads int) (int, error) {
	f, err := c.loader.Function(program, name, 0)
	if err != nil {
		return 0, err
	}
	key := blocksKey{f, threads}
	if c.blocks[key] == 0 {
		n, err := f.Blocks(threads, 0)
		if err != nil {
			return 0, err
		}
		c.blocks[key] = max(n, 1)
	}
	return c.blocks[key] * c.loader.Device().SMs, nil
}

func (c *Ops) work() uint64 { return c.memory.Addr() }

// typeNames holds the element types in kernels' names.
var typeNames = map[tensor.DType]string{
	tensor.F64: "fp64", tensor.F32: "fp32", tensor.F16: "fp16", tensor.BF16: "bf16",
}

// lanesOf returns the elements of a vector of 16 bytes.
func lanesOf(t tensor.DType) int { return 16 / t.Size() }

// aligned16 reports whether all views begin at a multiple of 16 bytes.
func aligned16(vs ...View) bool {
	for _, v := range vs {
		if v.Addr()%16 != 0 {
			return false
		}
	}
	return true
}

// denseActivations panics unless all views are dense and have the same type of activations.
func denseActivations(op string, vs ...View) {
	t := vs[0].DType()
	shape.Must(t == tensor.F32 || t == tensor.F16 || t == tensor.BF16, op, vs...)
	for _, v := range vs {
		shape.Must(v.DType() == t && v.IsDense(), op, vs...)
	}
}

// denseFloats panics unless all views are dense and float32.
func denseFloats(op string, vs ...View) {
	for _, v := range vs {
		shape.Must(v.DType() == tensor.F32 && v.IsDense(), op, vs...)
	}
}

// flat describes elementwise work over dense views: a kernel on vectors, and another on single elements for unaligned
// views and the remainder.
type flat struct {
	program, name, any string
	lanes              int // elements of a vector
	vectors            int // vectors per thread
	anyElements        int // elements per thread of the kernel any; 0: vectors
}

const flatThreads = 256

// flat queues the kernels over n elements. args returns the arguments for n elements since lo. vectors reports whether
// the views are aligned for vectors.
func (c *Ops) flat(k flat, n int, vectors bool, args func(lo, n int) *cuda.Args) error {
	whole := n / k.lanes * k.lanes
	if !vectors {
		whole = 0
	}
	each := k.vectors
	if k.anyElements > 0 {
		each = k.anyElements
	}
	if whole > 0 {
		grid := cuda.Dim{X: ceilDiv(whole, k.lanes*k.vectors*flatThreads)}
		if err := c.launch(k.program, k.name, grid, cuda.Dim{X: flatThreads}, args(0, whole)); err != nil {
			return err
		}
	}
	if whole == n {
		return nil
	}
	grid := cuda.Dim{X: ceilDiv(n-whole, each*flatThreads)}
	return c.launch(k.program, k.any, grid, cuda.Dim{X: flatThreads}, args(whole, n-whole))
}

func elementOf(v View, i int) uint64 {
	if v.IsZero() {
		return 0
	}
	return v.Addr() + uint64(i*v.DType().Size())
}

// Copy copies src to dst, which have the same shape and may be strided. It converts between float types and rounds to
// the nearest, ties to even; from float64 to 16 bits it rounds twice, first to float32.
func (c *Ops) Copy(dst, src View) {
	shape.Must(shape.SameShape(dst, src), "copy", dst, src)
	same, flatly := dst.DType() == src.DType(), dst.IsDense() && src.IsDense()
	to, of := typeNames[dst.DType()], typeNames[src.DType()]
	shape.Must(same || to != "" && of != "", "copy", dst, src)
	c.stream.Do("copy", func() error {
		switch {
		case same && flatly:
			c.stream.Copy(dst.Addr(), src.Addr(), int64(dst.Size())*int64(dst.DType().Size()))
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

// Add adds src to dst, of the same shape. They have the same float type, or src has 16 bits and dst is float32.
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
				c.stream.Memset(v.Addr(), 0, int64(v.Size())*int64(v.DType().Size()))
				return nil
			}
			return c.strided(fmt.Sprintf("move_strided_%d", v.DType().Size()), v, View{})
		})
	}
}

// Affine sets y = x * scale + shift, of the same type and shape. y may be x.
func (c *Ops) Affine(y, x View, scale, shift float64) {
	c.mapped("affine", y, x, func(a *cuda.Args) { a.Float(scale).Float(shift) })
}

// Scale sets y = x * by, one float32. y may be x.
func (c *Ops) Scale(y, x, by View) {
	denseFloats("scale", by)
	shape.Must(by.Size() == 1, "scale", y, by)
	c.mapped("scale", y, x, func(a *cuda.Args) { a.View(by) })
}

// SoftCap replaces x by limit * tanh(x / limit).
func (c *Ops) SoftCap(x View, limit float64) {
	c.mapped("softcap", x, x, func(a *cuda.Args) { a.Float(limit).Float(1 / limit) })
}

// mapped queues a flat kernel of ops_copy.cu with factors.
func (c *Ops) mapped(op string, y, x View, factors func(*cuda.Args)) {
	denseActivations(op, y, x)
	shape.Must(shape.SameShape(y, x), op, y, x)
	name := op + "_" + typeNames[y.DType()]
	k := flat{program: "ops_copy", name: name, any: name + "_any", lanes: lanesOf(y.DType()), vectors: 4}
	c.stream.Do(op, func() error {
		return c.flat(k, y.Size(), aligned16(y, x), func(lo, n int) *cuda.Args {
			args := new(cuda.Args).Addr(elementOf(y, lo)).Addr(elementOf(x, lo)).Int64(int64(n))
			factors(args)
			return args
		})
	})
}

// Dropout sets y to d of x, given the numbers of the rows. y may be x.
func (c *Ops) Dropout(y, x, tokens View, d kernels.Dropout) {
	denseActivations("dropout", y, x)
	shape.Must(shape.SameShape(y, x) && tokens.Size() == x.Rows() && tokens.DType() == tensor.I32 && tokens.IsDense(),
		"dropout", y, x, tokens)
	name, columns := "dropout_"+typeNames[y.DType()], x.Cols()
	k := flat{program: "ops_copy", name: name, any: name + "_any", lanes: lanesOf(y.DType()), vectors: 4}
	vectors := aligned16(y, x) && columns%k.lanes == 0 // then one kernel processes all elements
	c.stream.Do("dropout", func() error {
		return c.flat(k, y.Size(), vectors, func(_, n int) *cuda.Args {
			return new(cuda.Args).View(y).View(x).View(tokens).Int64(int64(n)).Int64(int64(columns)).
				Int64(int64(d.Key)).Int64(int64(d.Threshold())).Float(d.Kept())
		})
	})
}

// pairwise queues a flat kernel of ops_copy.cu over dense views of the same size.
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

// strided queues a kernel of ops_copy.cu with one element per thread. src may be the zero View.
func (c *Ops) strided(name string, dst, src View) error { return c.stridedBy(1, name, dst, src) }

// stridedBy does the same with wide neighbouring elements per thread, moved as one word.
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
