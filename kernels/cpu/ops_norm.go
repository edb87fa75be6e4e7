package cpu

import (
	"math"

	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// RMSNorm (arXiv:1910.07467) normalises over the last axis: y = x * inv * w with inv =
// 1 / sqrt(mean(x^2) + eps). inv: [batch, seq, heads, 1]; w: [1, 1, 1, dim].
func (c *Kernels) RMSNorm(y, inv, x, w View, eps float64) {
	checkNorm("rmsnorm", inv, w, y, x)
	if y.DType() == tensor.F64 {
		rmsNorm[float64](c, y, inv, View{}, x, View{}, w, eps)
		return
	}
	rmsNorm[float32](c, y, inv, View{}, x, View{}, w, eps)
}

// AddRMSNorm sets sum = a + b and y = RMSNorm(sum). sum may be a.
func (c *Kernels) AddRMSNorm(y, inv, sum, a, b, w View, eps float64) {
	checkNorm("add rmsnorm", inv, w, y, sum, a, b)
	if y.DType() == tensor.F64 {
		rmsNorm[float64](c, y, inv, sum, a, b, w, eps)
		return
	}
	rmsNorm[float32](c, y, inv, sum, a, b, w, eps)
}

// checkNorm panics unless xs have one shape and inv and w go with it.
func checkNorm(op string, inv, w View, xs ...View) {
	all := append([]View{inv, w}, xs...)
	dense(op, inv.DType(), all...)
	x := xs[0]
	shape.Must(shape.SameShape(xs...) && x.Len(tensor.Dim) > 0 && w.Size() == x.Len(tensor.Dim) && inv.Size() == shape.RowsOver(x), op, all...)
}

// rmsNorm normalises a, or, where there is a sum, a + b.
func rmsNorm[T tensor.Float](c *Kernels, y, inv, sum, a, b, w View, eps float64) {
	n, rows := y.Len(tensor.Dim), shape.RowsOver(y)
	ys, is, as, ws := tensor.Data[T](y), tensor.Data[T](inv), tensor.Data[T](a), tensor.Data[T](w)
	var ss, bs []T
	name := "rmsnorm"
	if !sum.IsZero() {
		ss, bs, name = tensor.Data[T](sum), tensor.Data[T](b), "add rmsnorm"
	}
	c.queue(name, func() {
		c.blocks(rows, rowBlock(n), func(_, lo, hi int) {
			for r := lo; r < hi; r++ {
				x := as[r*n : (r+1)*n]
				if ss != nil {
					s := ss[r*n : (r+1)*n]
					addTo(s, x, bs[r*n:(r+1)*n])
					x = s
				}
				scale := T(1 / math.Sqrt(sumSquares(x)/float64(n)+eps))
				is[r] = scale
				out := ys[r*n : (r+1)*n]
				for i, v := range x {
					out[i] = v * scale * ws[i]
				}
			}
		})
	})
}

// RMSNormBackward sets dx to the gradient of x, or adds it, and adds that of w to dw.
// With g = dy * w: dx = inv * (g - x * inv^2 * mean(g * x)).
func (c *Kernels) RMSNormBackward(dx, dw, dy, x, inv, w View, accumulate bool) {
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

func rmsNormBackward[T tensor.Float](c *Kernels, dx, dw, dy, x, inv, w View, accumulate bool) {
	n, rows := x.Len(tensor.Dim), shape.RowsOver(x)
	dxs, dws, dys := tensor.Data[T](dx), tensor.Data[T](dw), tensor.Data[T](dy)
	xs, is, ws := tensor.Data[T](x), tensor.Data[T](inv), tensor.Data[T](w)
	c.queue("rmsnorm backward", func() {
		size := max(rowBlock(n), (rows+normParts-1)/normParts)
		parts := (rows + size - 1) / size
		partial := grow(&c.ops.f64, parts*n)
		clear(partial)
		c.blocks(rows, size, func(part, lo, hi int) {
			sums := partial[part*n : (part+1)*n]
			for r := lo; r < hi; r++ {
				at, to := r*n, (r+1)*n
				normRowBackward(dxs[at:to], sums, dys[at:to], xs[at:to], ws, float64(is[r]), accumulate)
			}
		})
		for i := range dws {
			sum := float64(dws[i])
			for p := range parts {
				sum += partial[p*n+i]
			}
			dws[i] = T(sum)
		}
	})
}

func normRowBackward[T tensor.Float](dx []T, dw []float64, dy, x, w []T, inv float64, accumulate bool) {
	dx, dw, x, w = dx[:len(dy)], dw[:len(dy)], x[:len(dy)], w[:len(dy)]
	dot := 0.0
	for i, d := range dy {
		dxi := float64(d) * float64(x[i])
		dw[i] += dxi * inv
		dot += dxi * float64(w[i])
	}
	scale, back := T(inv), T(inv*inv*inv*dot/float64(len(dy)))
	if accumulate {
		for i, d := range dy {
			dx[i] += d*w[i]*scale - x[i]*back
		}
		return
	}
	for i, d := range dy {
		dx[i] = d*w[i]*scale - x[i]*back
	}
}

func addTo[T tensor.Float](dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := range dst {
		dst[i] = a[i] + b[i]
	}
}

// sumSquares adds in four chains, which the processor runs side by side, in float64.
func sumSquares[T tensor.Float](x []T) float64 {
	var s0, s1, s2, s3 float64
	for ; len(x) >= 4; x = x[4:] {
		a, b, c, d := float64(x[0]), float64(x[1]), float64(x[2]), float64(x[3])
		s0, s1, s2, s3 = s0+a*a, s1+b*b, s2+c*c, s3+d*d
	}
	for _, v := range x {
		s0 += float64(v) * float64(v)
	}
	return (s0 + s1) + (s2 + s3)
}
