package kernels

import (
	"math"

	"github.com/cprun/cprun/internal/tensor"
)

// SumSquares adds the sum of the squares of g to sum, a float64 scalar.
func (c *CPU) SumSquares(sum, g View) {
	dense("sum of squares", g.DType(), g)
	must(sum.Size() == 1 && sum.DType() == tensor.F64, "sum of squares", sum, g)
	if g.DType() == tensor.F64 {
		addSquares[float64](c, sum, g)
		return
	}
	addSquares[float32](c, sum, g)
}

func addSquares[T tensor.Float](c *CPU, sum, g View) {
	total, gs := tensor.Data[float64](sum), tensor.Data[T](g)
	c.queue("sum of squares", func() {
		partial := grow(&c.ops.f64, (len(gs)+elementBlock-1)/elementBlock)
		c.blocks(len(gs), elementBlock, func(block, lo, hi int) {
			partial[block] = sumSquares(gs[lo:hi])
		})
		for _, s := range partial {
			total[0] += s
		}
	})
}

// AdamStep are the numbers of one step of AdamW. It is an alias of an unnamed type, as in
// internal/optim, which documents it: neither package imports the other.
type AdamStep = struct {
	LR, Beta1, Beta2, Eps, Decay float64
	MaxNorm                      float64
	Step                         int
}

// AdamW updates p, m and v in place by one step of AdamW (arXiv:1711.05101) with gradient
// g, in the order of operations of torch.optim.AdamW. All are of one type and size. With
// MaxNorm > 0, g is first scaled by min(1, MaxNorm / (sqrt(sum) + 1e-6)), sum a float64
// scalar, read when the step runs. copied, where it is not the zero View, is set to p in its
// own type.
func (c *CPU) AdamW(p, copied, g, m, v, sum View, h AdamStep) {
	dense("adamw", p.DType(), p, g, m, v)
	must(p.Size() == g.Size() && p.Size() == m.Size() && p.Size() == v.Size(), "adamw", p, g, m, v)
	must(h.MaxNorm <= 0 || sum.Size() == 1 && sum.DType() == tensor.F64, "adamw", sum)
	if p.DType() == tensor.F64 {
		adamW[float64](c, p, g, m, v, sum, h)
	} else {
		adamW[float32](c, p, g, m, v, sum, h)
	}
	if !copied.IsZero() {
		c.Copy(copied, p)
	}
}

func adamW[T tensor.Float](c *CPU, p, g, m, v, sum View, h AdamStep) {
	ps, gs, ms, vs := tensor.Data[T](p), tensor.Data[T](g), tensor.Data[T](m), tensor.Data[T](v)
	var norm2 []float64
	if h.MaxNorm > 0 {
		norm2 = tensor.Data[float64](sum)
	}
	t := float64(h.Step + 1)
	keep := T(1 - h.LR*h.Decay)
	rate := T(h.LR / (1 - math.Pow(h.Beta1, t)))
	root := T(math.Sqrt(1 - math.Pow(h.Beta2, t)))
	new1, old2, new2, eps := T(1-h.Beta1), T(h.Beta2), T(1-h.Beta2), T(h.Eps)
	c.queue("adamw", func() {
		clip := T(1)
		if norm2 != nil { // min hands a NaN on, as torch does
			clip = T(min(1, h.MaxNorm/(math.Sqrt(norm2[0])+1e-6)))
		}
		c.blocks(len(ps), elementBlock, func(_, lo, hi int) {
			p, g, m, v := ps[lo:hi], gs[lo:hi], ms[lo:hi], vs[lo:hi]
			for i := range p {
				gi := g[i] * clip
				mi := m[i] + (gi-m[i])*new1
				vi := v[i]*old2 + gi*gi*new2
				m[i], v[i] = mi, vi
				p[i] = p[i]*keep - rate*mi/(T(math.Sqrt(float64(vi)))/root+eps)
			}
		})
	})
}
