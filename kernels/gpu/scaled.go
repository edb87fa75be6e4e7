//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// convertsE4M3 is 10 times the first compute capability with conversions to E4M3.
const convertsE4M3 = 89

// Quantize sets byRow to x [R, C], each column times its element of by unless that is the zero View, and byColumn to
// the transpose of x, [C, N] with zeros from column R to the next multiple of kernels.ScaledUnit. One of them may be
// zero.
func (c *Ops) Quantize(byRow, byColumn kernels.Scaled, x, by View) {
	const op = "quantize"
	denseActivations(op, x)
	shape.Quantize(op, byRow, byColumn, x, by)
	shape.Must(aligned16(byRow.View, byColumn.View), op, byRow.View, byColumn.View)
	c.stream.Do(op, func() error {
		if dev := c.loader.Device(); dev.Arch < convertsE4M3 {
			return fmt.Errorf("%v has compute capability %d.%d; E4M3 needs 8.9 or later", dev, dev.Arch/10, dev.Arch%10)
		}
		p, zeros, launches := call.Quantize(byRow, byColumn, x, by)
		if zeros > OpsWorkspace {
			return fmt.Errorf("%v: the largest magnitudes do not fit the workspace of %d bytes", x, OpsWorkspace)
		}
		p.Largest = c.work()
		c.stream.Memset(p.Largest, 0, zeros)
		for _, l := range launches {
			if err := c.launchShared(call.ScaledProgram, l.Kernel, cuda.Dim{X: l.Grid[0], Y: l.Grid[1]},
				cuda.Dim{X: l.Threads}, l.Shared, cuda.Struct(new(cuda.Args), &p)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Transpose sets dst [C, R] to the transpose of src [R, C], of bytes. kernels.ScaledUnit divides R and C.
func (c *Ops) Transpose(dst, src View) {
	const op = "transpose"
	shape.Transpose(op, dst, src)
	if src.Size() == 0 {
		return
	}
	p, l := call.Transpose(dst, src)
	c.stream.Do(op, func() error {
		return c.launchShared(call.ScaledProgram, l.Kernel, cuda.Dim{X: l.Grid[0], Y: l.Grid[1]}, cuda.Dim{X: l.Threads},
			l.Shared, cuda.Struct(new(cuda.Args), &p))
	})
}

// ScaledLinear sets y [M, N] to a [M, K] times b [N, K] transposed, plus add, of the shape and type of y, which may be
// y. With the zero View as add it adds nothing. kernels.ScaledUnit divides N and K.
func (c *Ops) ScaledLinear(y View, a, b kernels.Scaled, add View) {
	const op = "scaled linear"
	denseActivations(op, y)
	shape.ScaledLinear(op, y, a, b, add)
	p := blas.Problem{M: y.Rows(), N: y.Cols(), K: a.Cols(), TransB: true, In: tensor.U8, Out: y.DType(),
		A: scaledMatrix(a), B: scaledMatrix(b), D: matrix(y)}
	if !add.IsZero() {
		denseActivations(op, y, add)
		p.C = matrix(add)
	}
	switch {
	case y.Size() == 0 || p.K == 0 && p.C == p.D:
	case p.K == 0 && add.IsZero():
		c.Zero(y)
	case p.K == 0:
		c.Copy(y, add)
	case !c.blas.Multiply(op, p):
		dev := c.loader.Device()
		c.stream.Fail(fmt.Errorf("%s: cuBLASLt has no %v on %v, of compute capability %d.%d; it multiplies E4M3 with "+
			"a factor for each row on GPUs of 9.0", op, p, dev, dev.Arch/10, dev.Arch%10))
	}
}

func scaledMatrix(x kernels.Scaled) blas.Matrix {
	return blas.Matrix{Addr: x.Addr(), Stride: int64(x.Cols()), Factors: x.Factors.Addr()}
}
