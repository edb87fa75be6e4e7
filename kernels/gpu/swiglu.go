//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/internal/shape"
)

// SwiGLU sets y = silu(gate) * up.
func (c *Ops) SwiGLU(y, gate, up View) {
	denseActivations("swiglu", y, gate, up)
	shape.Must(shape.SameShape(y, gate, up), "swiglu", y, gate, up)
	name := typeNames[y.DType()]
	k := flat{program: "ops_swiglu", name: "swiglu_" + name, any: "swiglu_any_" + name, lanes: lanesOf(y.DType()),
		vectors: 4, anyElements: 1}
	c.stream.Do("swiglu", func() error {
		return c.flat(k, y.Size(), aligned16(y, gate, up), func(lo, n int) *cuda.Args {
			return new(cuda.Args).Addr(elementOf(y, lo)).Addr(elementOf(gate, lo)).Addr(elementOf(up,
				lo)).Int64(int64(n))
		})
	})
}

// SwiGLUBackward sets dgate = dy * up * s * (1 + gate * (1 - s)), with s = sigmoid(gate), and
// dup = dy * silu(gate). They may be gate and up.
func (c *Ops) SwiGLUBackward(dgate, dup, dy, gate, up View) {
	denseActivations("swiglu backward", dgate, dup, dy, gate, up)
	shape.Must(shape.SameShape(dgate, dup, dy, gate, up), "swiglu backward", dgate, dup, dy, gate, up)
	name := typeNames[dy.DType()]
	k := flat{program: "ops_swiglu", name: "swiglu_backward_" + name, any: "swiglu_backward_any_" + name,
		lanes: lanesOf(dy.DType()), vectors: 2, anyElements: 1}
	c.stream.Do("swiglu backward", func() error {
		return c.flat(k, dy.Size(), aligned16(dgate, dup, dy, gate, up), func(lo, n int) *cuda.Args {
			return new(cuda.Args).Addr(elementOf(dgate, lo)).Addr(elementOf(dup, lo)).Addr(elementOf(dy,
				lo)).Addr(elementOf(gate, lo)).Addr(elementOf(up, lo)).Int64(int64(n))
		})
	})
}
