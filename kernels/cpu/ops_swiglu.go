package cpu

import (
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// SwiGLU (arXiv:2002.05202) sets y = silu(gate) * up.
func (c *Kernels) SwiGLU(y, gate, up tensor.View) {
	if isHalf(y.DType()) {
		c.halfSwiGLU(y, gate, up)
		return
	}
	dense("swiglu", y.DType(), y, gate, up)
	shape.Must(shape.SameShape(y, gate, up), "swiglu", y, gate, up)
	if y.DType() == tensor.F64 {
		swiGLU[float64](c, y, gate, up)
		return
	}
	swiGLU[float32](c, y, gate, up)
}

func swiGLU[T tensor.Float](c *Kernels, y, gate, up tensor.View) {
	l, ys, gs, us := simd.LoopsOf[T](c.level), tensor.Data[T](y), tensor.Data[T](gate), tensor.Data[T](up)
	c.queue("swiglu", func() {
		c.blocks(len(ys), elementBlock, func(_, lo, hi int) {
			l.SwiGLU(ys[lo:hi], gs[lo:hi], us[lo:hi])
		})
	})
}

// SwiGLUBackward sets dgate = dy * up * s * (1 + gate * (1 - s)), with s = sigmoid(gate),
// and dup = dy * silu(gate). They may be gate and up.
func (c *Kernels) SwiGLUBackward(dgate, dup, dy, gate, up tensor.View) {
	if isHalf(dy.DType()) {
		c.halfSwiGLUBackward(dgate, dup, dy, gate, up)
		return
	}
	dense("swiglu backward", dgate.DType(), dgate, dup, dy, gate, up)
	shape.Must(shape.SameShape(dgate, dup, dy, gate, up), "swiglu backward", dgate, dup, dy, gate, up)
	if dgate.DType() == tensor.F64 {
		swiGLUBackward[float64](c, dgate, dup, dy, gate, up)
		return
	}
	swiGLUBackward[float32](c, dgate, dup, dy, gate, up)
}

func swiGLUBackward[T tensor.Float](c *Kernels, dgate, dup, dy, gate, up tensor.View) {
	dgs, dus, dys := tensor.Data[T](dgate), tensor.Data[T](dup), tensor.Data[T](dy)
	l, gs, us := simd.LoopsOf[T](c.level), tensor.Data[T](gate), tensor.Data[T](up)
	c.queue("swiglu backward", func() {
		c.blocks(len(dgs), elementBlock, func(_, lo, hi int) {
			l.SwiGLUBackward(dgs[lo:hi], dus[lo:hi], dys[lo:hi], gs[lo:hi], us[lo:hi])
		})
	})
}
