package kernels

import "github.com/cprun/cprun/internal/tensor"

// Rope rotates x [batch, seq, heads, dim] in place (arXiv:2104.09864), halves against
// halves as Hugging Face does: (x1*cos - x2*sin, x2*cos + x1*sin). cos, sin: [batch, seq, 1,
// dim/2]. inverse rotates back, which is the transpose and the backward pass.
func (c *CPU) Rope(x, cos, sin View, inverse bool) {
	dense("rope", x.DType(), x, cos, sin)
	must(sameShape(cos, sin) && cos.Rows() == x.Rows() && 2*cos.Cols() == x.Len(tensor.Dim), "rope", x, cos, sin)
	if x.DType() == tensor.F64 {
		rope[float64](c, x, cos, sin, inverse)
		return
	}
	rope[float32](c, x, cos, sin, inverse)
}

func rope[T tensor.Float](c *CPU, x, cos, sin View, inverse bool) {
	xs, cs, ss := tensor.Data[T](x), tensor.Data[T](cos), tensor.Data[T](sin)
	heads, half := x.Len(tensor.Heads), cos.Cols()
	sign := T(1)
	if inverse {
		sign = -1
	}
	c.queue("rope", func() {
		c.blocks(x.Rows(), rowBlock(x.Cols()), func(_, lo, hi int) {
			for h := lo * heads; h < hi*heads; h++ {
				r := h / heads
				cr, sr := cs[r*half:(r+1)*half], ss[r*half:(r+1)*half]
				x1, x2 := xs[2*h*half:][:half], xs[(2*h+1)*half:][:half]
				for i, co := range cr {
					si, a, b := sign*sr[i], x1[i], x2[i]
					x1[i], x2[i] = a*co-b*si, b*co+a*si
				}
			}
		})
	})
}
