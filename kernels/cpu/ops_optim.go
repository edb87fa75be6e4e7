package cpu

import (
	"math"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// SumSquares adds the sum of the squares of g to sum, a float64 scalar.
func (c *Kernels) SumSquares(sum, g tensor.View) {
	dense("sum of squares", g.DType(), g)
	shape.Must(sum.Size() == 1 && sum.DType() == tensor.F64, "sum of squares", sum, g)
	if g.DType() == tensor.F64 {
		addSquares[float64](c, sum, g)
		return
	}
	addSquares[float32](c, sum, g)
}

func addSquares[T tensor.Float](c *Kernels, sum, g tensor.View) {
	l, total, gs := simd.LoopsOf[T](c.level), tensor.Data[float64](sum), tensor.Data[T](g)
	c.queue("sum of squares", func() {
		partial := grow(&c.ops.f64, (len(gs)+elementBlock-1)/elementBlock)
		c.blocks(len(gs), elementBlock, func(block, lo, hi int) {
			partial[block] = l.SumSquares(gs[lo:hi])
		})
		for _, s := range partial {
			total[0] += s
		}
	})
}

// AdamW updates p, m and v in place by one step of AdamW (arXiv:1711.05101) with gradient
// g, in the order of operations of torch.optim.AdamW. All are of one type and size. With
// MaxNorm > 0, g is first scaled by min(1, MaxNorm / (sqrt(sum) + 1e-6)), sum a float64
// scalar, read when the step runs. With Scale > 0, g and sqrt(sum) are that much too large, and
// where sum is not finite the step changes nothing. copied, where it is not the zero View, is
// set to p in its own type.
func (c *Kernels) AdamW(p, copied, g, m, v, sum tensor.View, h kernels.AdamStep) {
	dense("adamw", p.DType(), p, g, m, v)
	shape.Must(p.Size() == g.Size() && p.Size() == m.Size() && p.Size() == v.Size(), "adamw", p, g, m, v)
	shape.Must(h.MaxNorm <= 0 && h.Scale <= 0 || sum.Size() == 1 && sum.DType() == tensor.F64, "adamw", sum)
	if p.DType() == tensor.F64 {
		adamW[float64](c, p, g, m, v, sum, h)
	} else {
		adamW[float32](c, p, g, m, v, sum, h)
	}
	if !copied.IsZero() {
		c.Copy(copied, p)
	}
}

func adamW[T tensor.Float](c *Kernels, p, g, m, v, sum tensor.View, h kernels.AdamStep) {
	l := simd.LoopsOf[T](c.level)
	ps, gs, ms, vs := tensor.Data[T](p), tensor.Data[T](g), tensor.Data[T](m), tensor.Data[T](v)
	var norm2 []float64
	if h.MaxNorm > 0 || h.Scale > 0 {
		norm2 = tensor.Data[float64](sum)
	}
	t := float64(h.Step + 1)
	step := simd.AdamStep[T]{
		New1: T(1 - h.Beta1), Old2: T(h.Beta2), New2: T(1 - h.Beta2),
		Keep: T(1 - h.LR*h.Decay), Rate: T(h.LR / (1 - math.Pow(h.Beta1, t))),
		Root: T(math.Sqrt(1 - math.Pow(h.Beta2, t))), Eps: T(h.Eps),
	}
	c.queue("adamw", func() {
		f, ok := gradFactor(norm2, h)
		if !ok {
			return
		}
		step.Factor = T(f)
		c.blocks(len(ps), elementBlock, func(_, lo, hi int) {
			l.AdamW(ps[lo:hi], gs[lo:hi], ms[lo:hi], vs[lo:hi], &step)
		})
	})
}

// gradFactor is what the gradient is multiplied by: 1 over its scale, and what it is clipped by.
// It is not ok for a step that is skipped. norm2 is there where the step needs it.
func gradFactor(norm2 []float64, h kernels.AdamStep) (factor float64, ok bool) {
	clip, unscale := 1.0, 1.0
	if h.Scale > 0 {
		if x := norm2[0]; x-x != 0 { // neither NaN nor an infinity equals itself less itself
			return 0, false
		}
		unscale = 1 / h.Scale
	}
	if h.MaxNorm > 0 { // min hands a NaN on, as torch does
		clip = min(1, h.MaxNorm/(math.Sqrt(norm2[0])*unscale+1e-6))
	}
	return clip * unscale, true
}
