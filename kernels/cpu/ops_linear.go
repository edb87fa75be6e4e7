package cpu

import (
	"math"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Linear sets y [rows, out] to x [rows, in] times w [out, in] transposed, plus add, which
// may be the zero View.
func (c *Kernels) Linear(y, x, w, add View) {
	denseActivations("linear", y, x, w)
	shape.Must(y.Rows() == x.Rows() && x.Cols() == w.Cols() && y.Cols() == w.Rows(), "linear", y, x, w)
	if !add.IsZero() {
		denseActivations("linear", y, add)
		shape.Must(add.Rows() == y.Rows() && add.Cols() == y.Cols(), "linear", y, add)
	}
	if y.DType() == tensor.F64 {
		linear[float64](c, y, x, w, add)
		return
	}
	linear[float32](c, y, x, w, add)
}

func linear[T tensor.Float](c *Kernels, y, x, w, add View) {
	p := newProduct(c, y, factorOf[T](x, false), factorOf[T](w, true), x.Cols())
	if !add.IsZero() {
		m := memoryOf[T](add)
		p.begin = &m
	}
	c.queue("linear", func() { p.run(c) })
}

// LinearDX sets dx [rows, in] to dy [rows, out] times w [out, in], or adds it.
func (c *Kernels) LinearDX(dx, dy, w View, accumulate bool) {
	denseActivations("linear dx", dx, dy, w)
	shape.Must(dx.Rows() == dy.Rows() && dx.Cols() == w.Cols() && dy.Cols() == w.Rows(), "linear dx", dx, dy, w)
	if dx.DType() == tensor.F64 {
		linearDX[float64](c, dx, dy, w, accumulate)
		return
	}
	linearDX[float32](c, dx, dy, w, accumulate)
}

func linearDX[T tensor.Float](c *Kernels, dx, dy, w View, accumulate bool) {
	p := newProduct(c, dx, factorOf[T](dy, false), factorOf[T](w, false), dy.Cols())
	p.accumulate = accumulate
	c.queue("linear dx", func() { p.run(c) })
}

// LinearDW adds dy [rows, out] transposed times x [rows, in] to dw [out, in], of the type of the
// activations or, where that has 16 bits, float32.
func (c *Kernels) LinearDW(dw, dy, x View) {
	denseActivations("linear dw", dy, x)
	shape.Must((dw.DType() == x.DType() || isHalf(x.DType()) && dw.DType() == tensor.F32) &&
		dw.IsDense(), "linear dw", dw, dy, x)
	shape.Must(dy.Rows() == x.Rows() && dw.Cols() == x.Cols() && dw.Rows() == dy.Cols(), "linear dw", dw, dy, x)
	if dw.DType() == tensor.F64 {
		linearDW[float64](c, dw, dy, x)
		return
	}
	linearDW[float32](c, dw, dy, x)
}

func linearDW[T tensor.Float](c *Kernels, dw, dy, x View) {
	p := newProduct(c, dw, factorOf[T](dy, true), factorOf[T](x, false), x.Rows())
	p.accumulate = true
	c.queue("linear dw", func() { p.run(c) })
}

// newProduct returns a product over k into a matrix.
func newProduct[T tensor.Float](c *Kernels, out View, left, right factor[T], k int) *product[T] {
	return &product[T]{
		m: out.Rows(), n: out.Cols(), k: k, loops: simd.LoopsOf[T](c.level), left: left, right: right,
		out: memoryOf[T](out),
	}
}

func factorOf[T tensor.Float](v View, turned bool) factor[T] {
	return factor[T]{memoryOf[T](v), v.Cols(), turned}
}

// SumSquares adds the sum of the squares of g to sum, a float64 scalar.
func (c *Kernels) SumSquares(sum, g View) {
	dense("sum of squares", g.DType(), g)
	shape.Must(sum.Size() == 1 && sum.DType() == tensor.F64, "sum of squares", sum, g)
	if g.DType() == tensor.F64 {
		addSquares[float64](c, sum, g)
		return
	}
	addSquares[float32](c, sum, g)
}

func addSquares[T tensor.Float](c *Kernels, sum, g View) {
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
func (c *Kernels) AdamW(p, copied, g, m, v, sum View, h kernels.AdamStep) {
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

func adamW[T tensor.Float](c *Kernels, p, g, m, v, sum View, h kernels.AdamStep) {
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

// gradFactor returns the factor of the gradient: 1 over its scale, times the clip. ok is false for a skipped step. A
// step that needs norm2 has it.
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
