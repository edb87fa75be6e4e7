//go:build cuda

package gpu

import (
	"math"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// squaresBlocks is the most blocks of SumSquares, and squaresShare the elements from which on
// there is another. Both set the order of the sum, so they are the same on every GPU.
const (
	squaresBlocks = 4096
	squaresShare  = 1 << 12
)

// SumSquares adds the sum of the squares of g, dense float32, to sum, a float64 scalar. It is
// float64, in an order that depends on the size of g and whether it is aligned to 16 bytes.
func (c *Ops) SumSquares(sum, g View) {
	denseFloats("sum of squares", g)
	shape.Must(sum.Size() == 1 && sum.DType() == tensor.F64, "sum of squares", sum, g)
	if g.Size() == 0 {
		return
	}
	c.stream.Do("sum of squares", func() error {
		whole := g.Size() / 4 * 4
		if !aligned16(g) {
			whole = 0
		}
		parts := 0
		for _, part := range []struct {
			kernel string
			lo, n  int
		}{{"squares_fp32", 0, whole}, {"squares_any_fp32", whole, g.Size() - whole}} {
			blocks := min(ceilDiv(part.n, squaresShare), squaresBlocks)
			args := new(cuda.Args).Addr(c.work() + uint64(8*parts)).Addr(elementOf(g, part.lo)).Int64(int64(part.n))
			if err := c.launch("ops_optim", part.kernel, cuda.Dim{X: blocks}, cuda.Dim{X: flatThreads},
				args); err != nil {
				return err
			}
			parts += blocks
		}
		return c.addScalars(sum, parts)
	})
}

// AdamW updates p, m and v, dense float32, in place by one step with gradient g, by the formulas
// of the CPU. With MaxNorm > 0, g is first scaled by min(1, MaxNorm / (sqrt(sum) + 1e-6)), sum a
// float64 scalar, read when the step runs. With Scale > 0, g and sqrt(sum) are that much too
// large, and where sum is not finite the step changes nothing, as the device finds by itself.
// copied, where it is not the zero View, is set to p in its own type.
func (c *Ops) AdamW(p, copied, g, m, v, sum View, h kernels.AdamStep) {
	denseFloats("adamw", p, g, m, v)
	shape.Must(p.Size() == g.Size() && p.Size() == m.Size() && p.Size() == v.Size(), "adamw", p, g, m, v)
	shape.Must(h.MaxNorm <= 0 && h.Scale <= 0 || sum.Size() == 1 && sum.DType() == tensor.F64, "adamw", sum)
	name, all := "none", []View{p, g, m, v}
	if !copied.IsZero() {
		denseActivations("adamw", copied)
		shape.Must(copied.Size() == p.Size(), "adamw", p, copied)
		name, all = typeNames[copied.DType()], append(all, copied)
	}
	k := flat{program: "ops_optim", name: "adamw_" + name, any: "adamw_any_" + name, lanes: 4, vectors: 2}
	step := adamStep(h)
	c.stream.Do("adamw", func() error {
		return c.flat(k, p.Size(), aligned16(all...), func(lo, n int) *cuda.Args {
			a := new(cuda.Args)
			for _, x := range []View{p, copied, g, m, v} {
				a.Addr(elementOf(x, lo))
			}
			return cuda.Struct(a.View(sum).Int64(int64(n)), &step)
		})
	})
}

// adamStep returns the numbers of a step as the kernel has them, each rounded once.
func adamStep(h kernels.AdamStep) source.AdamStep {
	t, unscale := float64(h.Step+1), 0.0
	if h.Scale > 0 {
		unscale = 1 / h.Scale
	}
	return source.AdamStep{
		MaxNorm: h.MaxNorm, Keep: float32(1 - h.LR*h.Decay),
		Rate: float32(h.LR / (1 - math.Pow(h.Beta1, t))), Root: float32(math.Sqrt(1 - math.Pow(h.Beta2, t))),
		New1: float32(1 - h.Beta1), Old2: float32(h.Beta2), New2: float32(1 - h.Beta2),
		Eps: float32(h.Eps), Unscale: float32(unscale),
	}
}
