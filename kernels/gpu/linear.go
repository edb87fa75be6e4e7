//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

func openBlas(stream *cuda.Stream) (*blas.Handle, error) {
	work, err := stream.Device().Alloc(LinearWorkspace)
	if err != nil {
		return nil, fmt.Errorf("workspace of matrix products: %w", err)
	}
	return blas.Open(stream, work)
}

// Tune has matrix products choose their algorithm by time when they are first used, for which
// the caller waits; see blas.Handle.Tune.
func (c *Ops) Tune(on bool) { c.blas.Tune(on) }

// Linear sets y [rows, out] to x [rows, in] times w [out, in] transposed, plus add, which may be
// the zero View.
func (c *Ops) Linear(y, x, w, add View) { c.multiply("linear", linearProblem(y, x, w, add)) }

// LinearDX sets dx [rows, in] to dy [rows, out] times w [out, in], or adds it.
func (c *Ops) LinearDX(dx, dy, w View, accumulate bool) {
	c.multiply("linear dx", linearDXProblem(dx, dy, w, accumulate))
}

// LinearDW adds dy [rows, out] transposed times x [rows, in] to dw [out, in], float32 or of the
// type of the activations.
func (c *Ops) LinearDW(dw, dy, x View) { c.multiply("linear dw", linearDWProblem(dw, dy, x)) }

func linearProblem(y, x, w, add View) blas.Problem {
	denseActivations("linear", y, x, w)
	shape.Must(y.Rows() == x.Rows() && x.Cols() == w.Cols() && y.Cols() == w.Rows(), "linear", y, x, w)
	p := blas.Problem{
		M: y.Rows(), N: y.Cols(), K: x.Cols(), TransB: true, In: x.DType(), Out: y.DType(),
		A: matrix(x), B: matrix(w), D: matrix(y),
	}
	if !add.IsZero() {
		denseActivations("linear", y, add)
		shape.Must(add.Rows() == y.Rows() && add.Cols() == y.Cols(), "linear", y, add)
		p.C = matrix(add)
	}
	return p
}

func linearDXProblem(dx, dy, w View, accumulate bool) blas.Problem {
	denseActivations("linear dx", dx, dy, w)
	shape.Must(dx.Rows() == dy.Rows() && dx.Cols() == w.Cols() && dy.Cols() == w.Rows(), "linear dx", dx, dy, w)
	p := blas.Problem{
		M: dx.Rows(), N: dx.Cols(), K: dy.Cols(), In: dx.DType(), Out: dx.DType(),
		A: matrix(dy), B: matrix(w), D: matrix(dx),
	}
	if accumulate {
		p.C = p.D
	}
	return p
}

func linearDWProblem(dw, dy, x View) blas.Problem {
	denseActivations("linear dw", dy, x)
	shape.Must((dw.DType() == tensor.F32 || dw.DType() == x.DType()) && dw.IsDense(), "linear dw", dw, dy, x)
	shape.Must(dy.Rows() == x.Rows() && dw.Cols() == x.Cols() && dw.Rows() == dy.Cols(), "linear dw", dw, dy, x)
	p := blas.Problem{
		M: dw.Rows(), N: dw.Cols(), K: x.Rows(), TransA: true, In: x.DType(), Out: dw.DType(),
		A: matrix(dy), B: matrix(x), D: matrix(dw),
	}
	p.C = p.D
	return p
}

func matrix(v View) blas.Matrix { return blas.Matrix{Addr: cuda.Addr(v), Stride: int64(v.Cols())} }

// multiply queues a product: by cuBLASLt, or by a kernel of our own for what it does not do.
func (c *Ops) multiply(name string, p blas.Problem) {
	switch {
	case p.M == 0 || p.N == 0 || p.K == 0 && p.C == p.D:
		return
	case p.K > 0 && c.blas.Multiply(name, p):
		return
	}
	c.stream.Do(name, func() error { return c.simple(p) })
}

// simple queues the product by gemm_simple.cu.
func (c *Ops) simple(p blas.Problem) error {
	args := new(cuda.Args).Addr(p.D.Addr).Int64(p.D.Stride).Addr(p.C.Addr).Int64(p.C.Stride)
	// The kernel takes A as m by k and B as n by k, with any strides.
	for _, x := range []struct {
		blas.Matrix
		turned bool
	}{{p.A, p.TransA}, {p.B, !p.TransB}} {
		m := source.Matrix{At: x.Addr, Row: x.Stride, Column: 1}
		if x.turned {
			m.Row, m.Column = 1, x.Stride
		}
		cuda.Struct(args, &m)
	}
	args.Int64(int64(p.M)).Int64(int64(p.N)).Int64(int64(p.K))
	const tile, most = 64, 65535 // blocks along y; the kernel's loop does the rest
	grid := cuda.Dim{X: ceilDiv(p.N, tile), Y: min(ceilDiv(p.M, tile), most)}
	return c.launch("gemm_simple", "gemm_"+typeNames[p.In]+"_"+typeNames[p.Out], grid, cuda.Dim{X: 16, Y: 16}, args)
}
