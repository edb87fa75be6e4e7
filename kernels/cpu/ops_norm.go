package cpu

import (
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
	if y.DType() == tensor.F64 {
		rmsNorm[float64](c, y, inv, tensor.View{}, x, tensor.View{}, w, eps)
		return
	}
	rmsNorm[float32](c, y, inv, tensor.View{}, x, tensor.View{}, w, eps)
}

// AddRMSNorm sets sum = a + b and y = RMSNorm(sum). sum may be a.
func (c *Kernels) AddRMSNorm(y, inv, sum, a, b, w tensor.View, eps float64) {
	if isHalf(a.DType()) {
		c.halfAddNorm(y, inv, sum, a, b, w, eps)
		return
	}
	checkNorm("add rmsnorm", inv, w, y, sum, a, b)
	if y.DType() == tensor.F64 {
		rmsNorm[float64](c, y, inv, sum, a, b, w, eps)
		return
	}
	rmsNorm[float32](c, y, inv, sum, a, b, w, eps)
}

// checkNorm panics unless xs have one shape and inv and w go with it.
func checkNorm(op string, inv, w tensor.View, xs ...tensor.View) {
	all := append([]tensor.View{inv, w}, xs...)
	dense(op, inv.DType(), all...)
	x := xs[0]
	shape.Must(shape.SameShape(xs...) && x.Len(tensor.Dim) > 0 && w.Size() == x.Len(tensor.Dim) &&
		inv.Size() == shape.RowsOver(x), op, all...)
}

// rmsNorm normalises a, or, where there is a sum, a + b.
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
			for r := lo; r < hi; r++ { // row by row, so that the sum is still in cache
				at, to := r*n, (r+1)*n
				l.AddTo(ss[at:to], as[at:to], bs[at:to])
				l.RMSNorm(ys[at:to], is[r:r+1], ss[at:to], ws, eps)
			}
		})
	})
}

// RMSNormBackward sets dx to the gradient of x, or adds it, and adds that of w to dw.
// With g = dy * w: dx = inv * (g - x * inv^2 * mean(g * x)).
func (c *Kernels) RMSNormBackward(dx, dw, dy, x, inv, w tensor.View, accumulate bool) {
	if isHalf(x.DType()) {
		c.halfNormBackward(dx, dw, dy, x, inv, w, accumulate)
		return
	}
	checkNorm("rmsnorm backward", inv, w, dx, dy, x)
	shape.Must(dw.Size() == w.Size() && dw.DType() == w.DType() && dw.IsDense(), "rmsnorm backward", dw, w)
	if dx.DType() == tensor.F64 {
		rmsNormBackward[float64](c, dx, dw, dy, x, inv, w, accumulate)
		return
	}
	rmsNormBackward[float32](c, dx, dw, dy, x, inv, w, accumulate)
}

// normParts is the most partial sums of dw, each one piece of work and dim float64s.
const normParts = 32

func rmsNormBackward[T tensor.Float](c *Kernels, dx, dw, dy, x, inv, w tensor.View, accumulate bool) {
	l, n, rows := simd.LoopsOf[T](c.level), x.Len(tensor.Dim), shape.RowsOver(x)
	dxs, dws, dys := tensor.Data[T](dx), tensor.Data[T](dw), tensor.Data[T](dy)
	xs, is, ws := tensor.Data[T](x), tensor.Data[T](inv), tensor.Data[T](w)
	c.queue("rmsnorm backward", func() {
		size := max(rowBlock(n), (rows+normParts-1)/normParts)
		parts := (rows + size - 1) / size
		partial := grow(&c.ops.f64, (parts+1)*n)
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
