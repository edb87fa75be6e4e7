package cpu

import (
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// NormRope sets y [batch, seq, heads, dim] to the rotation (arXiv:2104.09864) of RMSNorm(x),
// halves against halves as Hugging Face does: (x1*cos - x2*sin, x2*cos + x1*sin). cos, sin:
// [batch, seq, 1, dim/2]; inv: [batch, seq, heads, 1], kept as by RMSNorm. With the zero View
// as w there is no norm, and y may be x.
func (c *Kernels) NormRope(y, inv, x, w, cos, sin tensor.View, eps float64) {
	if isHalf(x.DType()) {
		c.halfRope(y, inv, x, w, cos, sin, eps)
		return
	}
	checkRope("rope", w, cos, sin, y, x)
	if !w.IsZero() {
		checkNorm("norm and rope", inv, w, y, x)
	}
	if x.DType() == tensor.F64 {
		normRope[float64](c, y, inv, x, w, cos, sin, eps)
		return
	}
	normRope[float32](c, y, inv, x, w, cos, sin, eps)
}

func checkRope(op string, w, cos, sin tensor.View, xs ...tensor.View) {
	x := xs[0]
	all := append([]tensor.View{cos, sin}, xs...)
	dense(op, x.DType(), all...)
	shape.Must(shape.SameShape(cos, sin) && shape.SameShape(xs...) && cos.Rows() == x.Rows() &&
		2*cos.Cols() == x.Len(tensor.Dim), op, all...)
}

func normRope[T tensor.Float](c *Kernels, y, inv, x, w, cos, sin tensor.View, eps float64) {
	r := newRotation[T](c, x, cos, sin)
	ys, xs := tensor.Data[T](y), tensor.Data[T](x)
	var is, ws []T
	if !w.IsZero() {
		is, ws = tensor.Data[T](inv), tensor.Data[T](w)
	}
	n := 2 * r.half
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

// NormRopeBackward sets dx to the gradient of x given that of y, dy, and adds that of w to
// dw. dx may be dy. With the zero View as w, dw, x and inv are not used.
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
	if dx.DType() == tensor.F64 {
		normRopeBackward[float64](c, dx, dw, dy, x, inv, w, cos, sin)
		return
	}
	normRopeBackward[float32](c, dx, dw, dy, x, inv, w, cos, sin)
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

// A rotation is the angles of the rows of a tensor.
type rotation[T tensor.Float] struct {
	loops       simd.Loops[T]
	cos, sin    []T
	heads, half int
}

func newRotation[T tensor.Float](c *Kernels, x, cos, sin tensor.View) rotation[T] {
	return rotation[T]{simd.LoopsOf[T](c.level), tensor.Data[T](cos), tensor.Data[T](sin), x.Len(tensor.Heads),
		cos.Cols()}
}

// turn sets y to all heads of a row, x, turned by its angles, or back with sign -1. y may be x.
func (r rotation[T]) turn(y, x []T, row int, sign T) {
	lo, hi := row*r.half, (row+1)*r.half
	r.loops.Turn(y, x, r.cos[lo:hi], r.sin[lo:hi], sign)
}
