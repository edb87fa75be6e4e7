package cpu

import (
	"math"

	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// SwiGLU (arXiv:2002.05202) sets y = silu(gate) * up.
func (c *Kernels) SwiGLU(y, gate, up View) {
	dense("swiglu", y.DType(), y, gate, up)
	shape.Must(shape.SameShape(y, gate, up), "swiglu", y, gate, up)
	if y.DType() == tensor.F64 {
		swiGLU[float64](c, y, gate, up)
		return
	}
	swiGLU[float32](c, y, gate, up)
}

func swiGLU[T tensor.Float](c *Kernels, y, gate, up View) {
	ys, gs, us := tensor.Data[T](y), tensor.Data[T](gate), tensor.Data[T](up)
	c.queue("swiglu", func() {
		c.blocks(len(ys), elementBlock, func(_, lo, hi int) {
			var buf [gatePiece]float64
			for ; lo < hi; lo += gatePiece {
				to := min(lo+gatePiece, hi)
				y, g, u := ys[lo:to], gs[lo:to], us[lo:to]
				for i, s := range sigmoids(&buf, g) {
					y[i] = g[i] * T(s) * u[i]
				}
			}
		})
	})
}

// SwiGLUBackward sets dgate = dy * up * s * (1 + gate * (1 - s)), with s = sigmoid(gate),
// and dup = dy * silu(gate). They may be gate and up.
func (c *Kernels) SwiGLUBackward(dgate, dup, dy, gate, up View) {
	dense("swiglu backward", dgate.DType(), dgate, dup, dy, gate, up)
	shape.Must(shape.SameShape(dgate, dup, dy, gate, up), "swiglu backward", dgate, dup, dy, gate, up)
	if dgate.DType() == tensor.F64 {
		swiGLUBackward[float64](c, dgate, dup, dy, gate, up)
		return
	}
	swiGLUBackward[float32](c, dgate, dup, dy, gate, up)
}

func swiGLUBackward[T tensor.Float](c *Kernels, dgate, dup, dy, gate, up View) {
	dgs, dus, dys := tensor.Data[T](dgate), tensor.Data[T](dup), tensor.Data[T](dy)
	gs, us := tensor.Data[T](gate), tensor.Data[T](up)
	c.queue("swiglu backward", func() {
		c.blocks(len(dgs), elementBlock, func(_, lo, hi int) {
			var buf [gatePiece]float64
			for ; lo < hi; lo += gatePiece {
				to := min(lo+gatePiece, hi)
				dg, du, dy, g, u := dgs[lo:to], dus[lo:to], dys[lo:to], gs[lo:to], us[lo:to]
				for i, s := range sigmoids(&buf, g) {
					dyi, gi, ui := dy[i], g[i], u[i]
					dg[i] = dyi * ui * T(s*(1+float64(gi)*(1-s)))
					du[i] = dyi * gi * T(s)
				}
			}
		})
	})
}

// gatePiece is the gates whose sigmoids stand in a buffer at once.
const gatePiece = 256

// sigmoids is the sigmoid of each of g, at most gatePiece. It is exact to the exponential of
// T; what follows that is float64, so that 1 - sigmoid keeps its digits.
func sigmoids[T tensor.Float](buf *[gatePiece]float64, g []T) []float64 {
	s := buf[:len(g)]
	switch g := any(g).(type) {
	case []float32:
		for i, x := range g {
			s[i] = 1 / (1 + float64(exp32(-x)))
		}
	case []float64:
		for i, x := range g {
			s[i] = 1 / (1 + math.Exp(-x))
		}
	}
	return s
}
