package cpu

import (
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/kernels/internal/shape"
	"github.com/cprun/cprun/tensor"
)

// Linear sets y [rows, out] to x [rows, in] times w [out, in] transposed, plus add, which
// may be the zero View.
func (c *Kernels) Linear(y, x, w, add tensor.View) {
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

func linear[T tensor.Float](c *Kernels, y, x, w, add tensor.View) {
	p := newProduct(c, y, factorOf[T](x, false), factorOf[T](w, true), x.Cols())
	if !add.IsZero() {
		m := memoryOf[T](add)
		p.begin = &m
	}
	c.queue("linear", func() { p.run(c) })
}

// LinearDX sets dx [rows, in] to dy [rows, out] times w [out, in], or adds it.
func (c *Kernels) LinearDX(dx, dy, w tensor.View, accumulate bool) {
	denseActivations("linear dx", dx, dy, w)
	shape.Must(dx.Rows() == dy.Rows() && dx.Cols() == w.Cols() && dy.Cols() == w.Rows(), "linear dx", dx, dy, w)
	if dx.DType() == tensor.F64 {
		linearDX[float64](c, dx, dy, w, accumulate)
		return
	}
	linearDX[float32](c, dx, dy, w, accumulate)
}

func linearDX[T tensor.Float](c *Kernels, dx, dy, w tensor.View, accumulate bool) {
	p := newProduct(c, dx, factorOf[T](dy, false), factorOf[T](w, false), dy.Cols())
	p.accumulate = accumulate
	c.queue("linear dx", func() { p.run(c) })
}

// LinearDW adds dy [rows, out] transposed times x [rows, in] to dw [out, in], of the type of the
// activations or, where that has 16 bits, float32.
func (c *Kernels) LinearDW(dw, dy, x tensor.View) {
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

func linearDW[T tensor.Float](c *Kernels, dw, dy, x tensor.View) {
	p := newProduct(c, dw, factorOf[T](dy, true), factorOf[T](x, false), x.Rows())
	p.accumulate = true
	c.queue("linear dw", func() { p.run(c) })
}

// newProduct returns a product over k into a matrix.
func newProduct[T tensor.Float](c *Kernels, out tensor.View, left, right factor[T], k int) *product[T] {
	return &product[T]{
		m: out.Rows(), n: out.Cols(), k: k, loops: simd.LoopsOf[T](c.level), left: left, right: right,
		out: memoryOf[T](out),
	}
}

func factorOf[T tensor.Float](v tensor.View, turned bool) factor[T] {
	return factor[T]{memoryOf[T](v), v.Cols(), turned}
}
