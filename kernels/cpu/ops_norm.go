package cpu

import (
	"math"

	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// RMSNorm (arXiv:1910.07467) normalises over the last axis: y = x * inv * w with inv =
// 1 / sqrt(mean(x^2) + eps). inv: [batch, seq, heads, 1]; w: [1, 1, 1, dim].
func (c *Kernels) RMSNorm(y, inv, x, w tensor.View, eps float64) {
	if isHalf(x.DType()) {
		c.halfNorm(y, inv, x, w, eps)
		return
	}
	checkNorm("rmsnorm", inv, w, y, x)
	forType(y, rmsNorm[float64], rmsNorm[float32])(c, y, inv, tensor.View{}, x, tensor.View{}, w, eps)
}

// AddRMSNorm sets sum = a + b and y = RMSNorm(sum). sum may be a.
func (c *Kernels) AddRMSNorm(y, inv, sum, a, b, w tensor.View, eps float64) {
	if isHalf(a.DType()) {
		c.halfAddNorm(y, inv, sum, a, b, w, eps)
		return
	}
	checkNorm("add rmsnorm", inv, w, y, sum, a, b)
	forType(y, rmsNorm[float64], rmsNorm[float32])(c, y, inv, sum, a, b, w, eps)
}

// checkNorm panics unless xs have the same shape, and inv and w match it.
func checkNorm(op string, inv, w tensor.View, xs ...tensor.View) {
	all := append([]tensor.View{inv, w}, xs...)
	dense(op, inv.DType(), all...)
	x := xs[0]
	shape.Must(shape.SameShape(xs...) && x.Len(tensor.Dim) > 0 && w.Size() == x.Len(tensor.Dim) &&
		inv.Size() == shape.RowsOver(x), op, all...)
}

// rmsNorm normalises a or, if sum is not the zero View, sum = a + b.
func rmsNorm[T tensor.Float](c *Kernels, y, inv, sum, a, b, w tensor.View, eps float64) {
	l, n, rows := simd.LoopsOf[T](c.level), y.Len(tensor.Dim), shape.RowsOver(y)
	ys, is, as, ws := tensor.Data[T](y), tensor.Data[T](inv), tensor.Data[T](a), tensor.Data[T](w)
	var ss, bs []T
	name := "rmsnorm"
	if !sum.IsZero() {
		ss, bs, name = tensor.Data[T](sum), tensor.Data[T](b), "add rmsnorm"
	}
	c.queue(name, func() {
		c.blocks(rows, rowBlock(n), func(_, lo, hi int) {
			if ss == nil {
				l.RMSNorm(ys[lo*n:hi*n], is[lo:hi], as[lo*n:hi*n], ws, eps)
				return
			}
			for r := lo; r < hi; r++ { // row by row: the sum stays in the cache
				at, to := r*n, (r+1)*n
				l.AddTo(ss[at:to], as[at:to], bs[at:to])
				l.RMSNorm(ys[at:to], is[r:r+1], ss[at:to], ws, eps)
			}
		})
	})
}

// RMSNormBackward sets dx to the gradient of x, or adds it, and adds the gradient of w to dw.
// With g = dy * w: dx = inv * (g - x * inv^2 * mean(g * x)).
func (c *Kernels) RMSNormBackward(dx, dw, dy, x, inv, w tensor.View, accumulate bool) {
	if isHalf(x.DType()) {
		c.halfNormBackward(dx, dw, dy, x, inv, w, accumulate)
		return
	}
	checkNorm("rmsnorm backward", inv, w, dx, dy, x)
	shape.Must(dw.Size() == w.Size() && dw.DType() == w.DType() && dw.IsDense(), "rmsnorm backward", dw, w)
	forType(dx, rmsNormBackward[float64], rmsNormBackward[float32])(c, dx, dw, dy, x, inv, w, accumulate)
}

// normParts limits the partial sums of dw. Each belongs to one piece of work and has dim float64s.
const normParts = 32

func rmsNormBackward[T tensor.Float](c *Kernels, dx, dw, dy, x, inv, w tensor.View, accumulate bool) {
	l, n, rows := simd.LoopsOf[T](c.level), x.Len(tensor.Dim), shape.RowsOver(x)
	dxs, dws, dys := tensor.Data[T](dx), tensor.Data[T](dw), tensor.Data[T](dy)
	xs, is, ws := tensor.Data[T](x), tensor.Data[T](inv), tensor.Data[T](w)
	c.queue("rmsnorm backward", func() {
		size := max(rowBlock(n), (rows+normParts-1)/normParts)
		parts := (rows + size - 1) / size
		partial := grow(&c.sums, (parts+1)*n)
		clear(partial)
		c.blocks(rows, size, func(part, lo, hi int) {
			at, to := lo*n, hi*n
			l.RMSNormBackward(dxs[at:to], partial[part*n:(part+1)*n], dys[at:to], xs[at:to], is[lo:hi], ws, accumulate)
		})
		total := partial[parts*n:]
		for i, v := range dws {
			total[i] = float64(v)
		}
		for p := range parts {
			simd.LoopsOf[float64](c.level).AddTo(total, total, partial[p*n:(p+1)*n])
		}
		for i, v := range total {
			dws[i] = T(v)
		}
	})
}

// NormRope sets y [batch, seq, heads, dim] to RoPE (arXiv:2104.09864) of RMSNorm(x), in Hugging Face's layout of
// halves: (x1*cos - x2*sin, x2*cos + x1*sin). cos, sin: [batch, seq, 1, pairs]; inv: [batch, seq, heads, 1], set as by
// RMSNorm. The halves are of the first 2*pairs elements of a head, and the others stay; cos and sin may be zero Views.
// If w is the zero View, there is no norm, and y may be x.
func (c *Kernels) NormRope(y, inv, x, w, cos, sin tensor.View, eps float64) {
	if isHalf(x.DType()) {
		c.halfRope(y, inv, x, w, cos, sin, eps)
		return
	}
	checkRope("rope", w, cos, sin, y, x)
	if !w.IsZero() {
		checkNorm("norm and rope", inv, w, y, x)
	}
	forType(x, normRope[float64], normRope[float32])(c, y, inv, x, w, cos, sin, eps)
}

func checkRope(op string, w, cos, sin tensor.View, xs ...tensor.View) {
	x := xs[0]
	dense(op, x.DType(), xs...)
	all := append([]tensor.View{cos, sin}, xs...)
	shape.Must(shape.SameShape(xs...) && x.Len(tensor.Dim)%2 == 0, op, all...)
	if cos.IsZero() && sin.IsZero() {
		return
	}
	dense(op, x.DType(), all...)
	shape.Must(shape.SameShape(cos, sin) && cos.Rows() == x.Rows() && 2*cos.Cols() <= x.Len(tensor.Dim), op, all...)
}

func normRope[T tensor.Float](c *Kernels, y, inv, x, w, cos, sin tensor.View, eps float64) {
	r := newRotation[T](c, x, cos, sin)
	ys, xs := tensor.Data[T](y), tensor.Data[T](x)
	var is, ws []T
	if !w.IsZero() {
		is, ws = tensor.Data[T](inv), tensor.Data[T](w)
	}
	n := r.dim
	c.queue("norm and rope", func() {
		c.blocks(x.Rows(), rowBlock(x.Cols()), func(_, lo, hi int) {
			for row := lo; row < hi; row++ {
				first, last := row*r.heads, (row+1)*r.heads
				from, to := xs[first*n:last*n], ys[first*n:last*n]
				if is != nil {
					r.loops.RMSNorm(to, is[first:last], from, ws, eps)
					from = to
				}
				r.turn(to, from, row, 1)
			}
		})
	})
}

// NormRopeBackward sets dx to the gradient of x, given dy, and adds the gradient of w to dw. dx may be dy. If w is the
// zero View, dw, x and inv are unused.
func (c *Kernels) NormRopeBackward(dx, dw, dy, x, inv, w, cos, sin tensor.View) {
	if isHalf(dx.DType()) {
		c.halfRopeBackward(dx, dw, dy, x, inv, w, cos, sin)
		return
	}
	checkRope("rope backward", w, cos, sin, dx, dy)
	if !w.IsZero() {
		checkNorm("norm and rope backward", inv, w, dx, dy, x)
		shape.Must(dw.Size() == w.Size() && dw.DType() == w.DType() && dw.IsDense(), "norm and rope backward", dw, w)
	}
	forType(dx, normRopeBackward[float64], normRopeBackward[float32])(c, dx, dw, dy, x, inv, w, cos, sin)
}

func normRopeBackward[T tensor.Float](c *Kernels, dx, dw, dy, x, inv, w, cos, sin tensor.View) {
	r := newRotation[T](c, dx, cos, sin)
	dxs, dys := tensor.Data[T](dx), tensor.Data[T](dy)
	n := dx.Cols()
	c.queue("rope backward", func() {
		c.blocks(dx.Rows(), rowBlock(n), func(_, lo, hi int) {
			for row := lo; row < hi; row++ {
				r.turn(dxs[row*n:(row+1)*n], dys[row*n:(row+1)*n], row, -1)
			}
		})
	})
	if !w.IsZero() {
		rmsNormBackward[T](c, dx, dw, dx, x, inv, w, false)
	}
}

// A rotation holds the angles of RoPE for the rows of a tensor.
type rotation[T tensor.Float] struct {
	loops             simd.Loops[T]
	cos, sin          []T
	heads, dim, pairs int
}

func newRotation[T tensor.Float](c *Kernels, x, cos, sin tensor.View) rotation[T] {
	r := rotation[T]{loops: simd.LoopsOf[T](c.level), heads: x.Len(tensor.Heads), dim: x.Len(tensor.Dim)}
	if !cos.IsZero() {
		r.cos, r.sin, r.pairs = tensor.Data[T](cos), tensor.Data[T](sin), cos.Cols()
	}
	return r
}

// turn rotates all heads of a row, x, into y: forward with sign 1, back with -1. y may be x.
func (r rotation[T]) turn(y, x []T, row int, sign T) {
	cos, sin := r.cos[row*r.pairs:(row+1)*r.pairs], r.sin[row*r.pairs:(row+1)*r.pairs]
	turned := 2 * r.pairs
	if turned == r.dim {
		r.loops.Turn(y, x, cos, sin, sign)
		return
	}
	for lo := 0; lo < len(x); lo += r.dim {
		r.loops.Turn(y[lo:lo+turned], x[lo:lo+turned], cos, sin, sign)
		copy(y[lo+turned:lo+r.dim], x[lo+turned:lo+r.dim])
	}
}

// SumRows adds the sum of the rows of x to sum, [1, 1, 1, n].
func (c *Kernels) SumRows(sum, x tensor.View) {
	n := x.Cols()
	if isHalf(x.DType()) {
		denseHalves("sum of rows", x)
		halfRows(x.Rows(), n, func(b halfSpan) { c.SumRows(sum, c.widened(0, b.of(x, 1, n))) })
		return
	}
	dense("sum of rows", x.DType(), sum, x)
	shape.Must(sum.Size() == n, "sum of rows", sum, x)
	forType(x, sumRows[float64], sumRows[float32])(c, sum, x)
}

func sumRows[T tensor.Float](c *Kernels, sum, x tensor.View) {
	n, to, xs := x.Cols(), tensor.Data[T](sum), tensor.Data[T](x)
	c.queue("sum of rows", func() {
		c.blocks(n, rowSumBlock, func(_, lo, hi int) {
			var sums [rowSumBlock]float64
			for row := lo; row < len(xs); row += n {
				for i, v := range xs[row : row+hi-lo] {
					sums[i] += float64(v)
				}
			}
			for i := lo; i < hi; i++ {
				to[i] = T(float64(to[i]) + sums[i-lo])
			}
		})
	})
}

// rowSumBlock is the columns of a piece of SumRows.
const rowSumBlock = 64

// GLU (arXiv:2002.05202) sets y = act(gate) * up.
func (c *Kernels) GLU(y, gate, up tensor.View, act kernels.Activation) {
	if isHalf(y.DType()) {
		c.halfGLU(y, gate, up, act)
		return
	}
	dense("glu", y.DType(), y, gate, up)
	shape.Must(shape.SameShape(y, gate, up), "glu", y, gate, up)
	forType(y, glu[float64], glu[float32])(c, y, gate, up, act)
}

func glu[T tensor.Float](c *Kernels, y, gate, up tensor.View, act kernels.Activation) {
	ys, gs, us := tensor.Data[T](y), tensor.Data[T](gate), tensor.Data[T](up)
	f, _ := gluLoops[T](c, act)
	c.queue("glu", func() {
		c.blocks(len(ys), elementBlock, func(_, lo, hi int) {
			f(ys[lo:hi], gs[lo:hi], us[lo:hi])
		})
	})
}

// GLUBackward sets dgate = dy * up * act'(gate) and dup = dy * act(gate). dgate may be gate, and dup may be up.
func (c *Kernels) GLUBackward(dgate, dup, dy, gate, up tensor.View, act kernels.Activation) {
	if isHalf(dy.DType()) {
		c.halfGLUBackward(dgate, dup, dy, gate, up, act)
		return
	}
	dense("glu backward", dgate.DType(), dgate, dup, dy, gate, up)
	shape.Must(shape.SameShape(dgate, dup, dy, gate, up), "glu backward", dgate, dup, dy, gate, up)
	forType(dgate, gluBackward[float64], gluBackward[float32])(c, dgate, dup, dy, gate, up, act)
}

func gluBackward[T tensor.Float](c *Kernels, dgate, dup, dy, gate, up tensor.View, act kernels.Activation) {
	dgs, dus, dys := tensor.Data[T](dgate), tensor.Data[T](dup), tensor.Data[T](dy)
	gs, us := tensor.Data[T](gate), tensor.Data[T](up)
	_, f := gluLoops[T](c, act)
	c.queue("glu backward", func() {
		c.blocks(len(dgs), elementBlock, func(_, lo, hi int) {
			f(dgs[lo:hi], dus[lo:hi], dys[lo:hi], gs[lo:hi], us[lo:hi])
		})
	})
}

// Dropout sets y to d of x, given the numbers of the rows. y may be x.
func (c *Kernels) Dropout(y, x, tokens tensor.View, d kernels.Dropout) {
	if isHalf(y.DType()) {
		c.halfDropout(y, x, tokens, d)
		return
	}
	dense("dropout", y.DType(), y, x)
	checkDropout(y, x, tokens)
	forType(y, dropout[float64], dropout[float32])(c, y, x, tokens, d)
}

func checkDropout(y, x, tokens tensor.View) {
	shape.Must(shape.SameShape(y, x) && tokens.Size() == x.Rows() && tokens.DType() == tensor.I32 && tokens.IsDense(),
		"dropout", y, x, tokens)
}

func dropout[T tensor.Float](c *Kernels, y, x, tokens tensor.View, d kernels.Dropout) {
	ys, xs, n, kept, least := tensor.Data[T](y), tensor.Data[T](x), x.Cols(), T(d.Kept()), d.Threshold()
	numbers := tensor.Data[int32](tokens)
	c.queue("dropout", func() {
		c.blocks(x.Rows(), rowBlock(n), func(_, lo, hi int) {
			for i := lo * n; i < hi*n; i++ {
				if d.Random(numbers[i/n], i%n) < least {
					ys[i] = 0
				} else {
					ys[i] = xs[i] * kept
				}
			}
		})
	})
}

// Linear sets y [rows, out] to x [rows, in] times w [out, in] transposed, plus add unless that is the zero View. y and
// add have the type of the activations, or float32 if those have 16 bits.
func (c *Kernels) Linear(y, x, w, add tensor.View) {
	denseActivations("linear", x, w)
	sums("linear", y, x)
	shape.Must(y.Rows() == x.Rows() && x.Cols() == w.Cols() && y.Cols() == w.Rows(), "linear", y, x, w)
	if !add.IsZero() {
		denseActivations("linear", y, add)
		shape.Must(add.Rows() == y.Rows() && add.Cols() == y.Cols(), "linear", y, add)
	}
	forType(y, linear[float64], linear[float32])(c, y, x, w, add)
}

func linear[T tensor.Float](c *Kernels, y, x, w, add tensor.View) {
	newProduct(c, y, factorOf[T](x, false), factorOf[T](w, true), x.Cols()).queue(c, "linear", add)
}

// LinearDX sets dx [rows, in] to dy [rows, out] times w [out, in], or adds it.
func (c *Kernels) LinearDX(dx, dy, w tensor.View, accumulate bool) {
	denseActivations("linear dx", dx, dy, w)
	shape.Must(dx.Rows() == dy.Rows() && dx.Cols() == w.Cols() && dy.Cols() == w.Rows(), "linear dx", dx, dy, w)
	forType(dx, linearDX[float64], linearDX[float32])(c, dx, dy, w, accumulate)
}

func linearDX[T tensor.Float](c *Kernels, dx, dy, w tensor.View, accumulate bool) {
	p := newProduct(c, dx, factorOf[T](dy, false), factorOf[T](w, false), dy.Cols())
	p.accumulate = accumulate
	c.queue("linear dx", func() { p.run(c) })
}

// LinearDW sets dw [out, in] to dy [rows, out] transposed times x [rows, in], or adds it. dw has the type of the
// activations, or float32 if they have 16 bits.
func (c *Kernels) LinearDW(dw, dy, x tensor.View, accumulate bool) {
	denseActivations("linear dw", dy, x)
	sums("linear dw", dw, x)
	shape.Must(dy.Rows() == x.Rows() && dw.Cols() == x.Cols() && dw.Rows() == dy.Cols(), "linear dw", dw, dy, x)
	forType(dw, linearDW[float64], linearDW[float32])(c, dw, dy, x, accumulate)
}

// sums panics unless v is dense and has the type of activations x, or float32 if that has 16 bits.
func sums(op string, v, x tensor.View) {
	shape.Must((v.DType() == x.DType() || isHalf(x.DType()) && v.DType() == tensor.F32) && v.IsDense(), op, v, x)
}

func linearDW[T tensor.Float](c *Kernels, dw, dy, x tensor.View, accumulate bool) {
	p := newProduct(c, dw, factorOf[T](dy, true), factorOf[T](x, false), x.Rows())
	p.accumulate = accumulate
	c.queue("linear dw", func() { p.run(c) })
}

// newProduct returns the product of left and right over k, into out.
func newProduct[T tensor.Float](c *Kernels, out tensor.View, left, right factor[T], k int) *product[T] {
	return &product[T]{
		m: out.Rows(), n: out.Cols(), k: k, loops: simd.LoopsOf[T](c.level), left: left, right: right,
		out: memoryOf[T](out),
	}
}

func factorOf[T tensor.Float](v tensor.View, transposed bool) factor[T] {
	return factor[T]{memory: memoryOf[T](v), ld: v.Cols(), transposed: transposed}
}

// SumSquares adds the sum of the squares of g to sum, a float64 scalar.
func (c *Kernels) SumSquares(sum, g tensor.View) {
	dense("sum of squares", g.DType(), g)
	shape.Must(sum.Size() == 1 && sum.DType() == tensor.F64, "sum of squares", sum, g)
	forType(g, addSquares[float64], addSquares[float32])(c, sum, g)
}

func addSquares[T tensor.Float](c *Kernels, sum, g tensor.View) {
	l, total, gs := simd.LoopsOf[T](c.level), tensor.Data[float64](sum), tensor.Data[T](g)
	c.queue("sum of squares", func() {
		partial := grow(&c.sums, (len(gs)+elementBlock-1)/elementBlock)
		c.blocks(len(gs), elementBlock, func(block, lo, hi int) {
			partial[block] = l.SumSquares(gs[lo:hi])
		})
		for _, s := range partial {
			total[0] += s
		}
	})
}

// AdamW updates p, m and v in place by one step of AdamW (arXiv:1711.05101) with gradient g, in torch.optim.AdamW's
// order of operations. All have the same type and size. With MaxNorm > 0, it first scales g by
// min(1, MaxNorm / (sqrt(sum) + 1e-6)); sum is a float64 scalar, read when the step runs. With Scale > 0, it divides g
// and sqrt(sum) by Scale, and changes nothing if sum is not finite. It copies the new p to copied, in copied's type,
// unless that is the zero View.
func (c *Kernels) AdamW(p, copied, g, m, v, sum tensor.View, h kernels.AdamStep) {
	dense("adamw", p.DType(), p, g, m, v)
	shape.Must(p.Size() == g.Size() && p.Size() == m.Size() && p.Size() == v.Size(), "adamw", p, g, m, v)
	shape.Must(h.MaxNorm <= 0 && h.Scale <= 0 || sum.Size() == 1 && sum.DType() == tensor.F64, "adamw", sum)
	forType(p, adamW[float64], adamW[float32])(c, p, g, m, v, sum, h)
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

// gradFactor returns the factor of the gradient: 1 over its scale, times the clip. ok is false if the step is skipped.
func gradFactor(norm2 []float64, h kernels.AdamStep) (factor float64, ok bool) {
	clip, unscale := 1.0, 1.0
	if h.Scale > 0 {
		if x := norm2[0]; x-x != 0 { // NaN or infinite
			return 0, false
		}
		unscale = 1 / h.Scale
	}
	if h.MaxNorm > 0 { // min returns NaN if the norm is NaN, as torch does
		clip = min(1, h.MaxNorm/(math.Sqrt(norm2[0])*unscale+1e-6))
	}
	return clip * unscale, true
}
