//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/blas"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// convertsE4M3 returns an error if the GPU has no conversions to E4M3.
func (c *Ops) convertsE4M3() error {
	if dev := c.loader.Device(); dev.Arch < 89 {
		return fmt.Errorf("%v has compute capability %d.%d; E4M3 needs 8.9 or later", dev, dev.Arch/10, dev.Arch%10)
	}
	return nil
}

// Quantize sets byRow to x [R, C], each column times its element of by unless that is the zero View, and byColumn to
// the transpose of x, [C, N] with zeros from column R to the next multiple of kernels.ScaledUnit. One of them may be
// zero.
func (c *Ops) Quantize(byRow, byColumn kernels.Scaled, x, by View) {
	const op = "quantize"
	denseActivations(op, x)
	shape.Quantize(op, byRow, byColumn, x, by)
	shape.Must(aligned16(byRow.View, byColumn.View), op, byRow.View, byColumn.View)
	c.stream.Do(op, func() error {
		if err := c.convertsE4M3(); err != nil {
			return err
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

// GroupQuantize sets to [P, C] to the row of x [P or T, C] of each place, times its expert's part of by, float32 [E*C].
// kernels.ScaledUnit divides C, which is at most 32768.
func (c *Ops) GroupQuantize(to kernels.Scaled, x kernels.Operand, by View, p kernels.Pairs) {
	const op = "group quantize"
	pairs := pairsArgs(op, p)
	holds(op, x, p)
	shape.GroupQuantize(op, to, x.View, by, p)
	params, l, ok := call.GroupQuantize(to, x.View, by)
	shape.Must(ok && aligned16(to.View, x.View, by), op, to.View, x.View, by)
	c.stream.Do(op, func() error {
		if err := c.convertsE4M3(); err != nil || to.Rows() == 0 {
			return err
		}
		args := cuda.Struct(cuda.Struct(new(cuda.Args), &params), pairs).Int(int(cInt(x.ByToken)))
		return c.launchShared(call.ScaledProgram, l.Kernel, cuda.Dim{X: l.Grid[0], Y: l.Grid[1]},
			cuda.Dim{X: l.Threads}, l.Shared, args)
	})
}

// GroupScaledLinear sets y [P, N] to each row of a [P or T, K] times the transpose of its expert's rows of b [E*N, K].
func (c *Ops) GroupScaledLinear(y View, a kernels.Operand, b kernels.Scaled, p kernels.Pairs) {
	const op = "group scaled linear"
	g := groupCall{source.GroupForward, y, a, stacked(b), p, y.Cols(), a.Cols(), false}
	g.check(op)
	switch {
	case y.Size() == 0:
	case a.Cols() == 0:
		c.Zero(y)
	case !c.groupOnHopper(g.onHopper()):
		dev := c.loader.Device()
		c.stream.Fail(fmt.Errorf("%s: there is no kernel for %v, %v and %v of %d experts on %v, of compute capability "+
			"%d.%d; it needs 9.0 and at most %d experts", op, y, a.View, b.View, p.Starts.Size()-1, dev, dev.Arch/10,
			dev.Arch%10, source.MaxGroupExperts))
	}
}

func scaledMatrix(x kernels.Scaled) blas.Matrix {
	return blas.Matrix{Addr: x.Addr(), Stride: int64(x.Cols()), Factors: x.Factors.Addr()}
}
