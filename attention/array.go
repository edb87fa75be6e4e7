package attention

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/tensor"
)

// An array is a dense copy of a host view in the arithmetic type A.
type array[A tensor.Float] struct {
	shape [4]int
	data  []A
}

// row returns the elements of [b, s, h, :].
func (a array[A]) row(b, s, h int) []A {
	n := a.shape[tensor.Dim]
	i := ((b*a.shape[tensor.Seq]+s)*a.shape[tensor.Heads] + h) * n
	return a.data[i : i+n]
}

func load[A tensor.Float](v View) array[A] {
	switch v.DType() {
	case tensor.F64:
		return loadAs(v, func(x float64) A { return A(x) })
	case tensor.F32:
		return loadAs(v, func(x float32) A { return A(x) })
	case tensor.BF16:
		return loadAs(v, func(x uint16) A { return A(half.FromBF16(x)) })
	case tensor.F16:
		return loadAs(v, func(x uint16) A { return A(half.FromF16(x)) })
	}
	panic(fmt.Sprintf("attention: %v is not of floats", v))
}

func loadAs[A tensor.Float, T tensor.Element](v View, convert func(T) A) array[A] {
	a := array[A]{shape: v.Shape(), data: make([]A, 0, v.Size())}
	walk(v, func(x *T) { a.data = append(a.data, convert(*x)) })
	return a
}

// store copies a to a view of its shape, of any float type.
func (a array[A]) store(v View) {
	i := 0
	switch v.DType() {
	case tensor.F64:
		walk(v, func(x *float64) { *x = float64(a.data[i]); i++ })
	case tensor.F32:
		walk(v, func(x *float32) { *x = float32(a.data[i]); i++ })
	case tensor.BF16:
		walk(v, func(x *uint16) { *x = half.ToBF16(float32(a.data[i])); i++ })
	case tensor.F16:
		walk(v, func(x *uint16) { *x = half.RoundToF16(float64(a.data[i])); i++ })
	default:
		panic(fmt.Sprintf("attention: %v is not of floats", v))
	}
}

// walk visits the elements of v, the last axis fastest.
func walk[T tensor.Element](v View, visit func(*T)) {
	if v.Size() == 0 {
		return
	}
	data, shape, stride := tensor.Data[T](v), v.Shape(), v.Strides()
	for b := range int64(shape[0]) {
		for s := range int64(shape[1]) {
			for h := range int64(shape[2]) {
				for d := range int64(shape[3]) {
					visit(&data[b*stride[0]+s*stride[1]+h*stride[2]+d*stride[3]])
				}
			}
		}
	}
}

// score applies Softmax's scale and soft cap to a dot product.
func score[A tensor.Float](x A, p Softmax) A {
	x *= A(p.Scale)
	if p.Softcap > 0 {
		x = A(p.Softcap) * A(math.Tanh(float64(x/A(p.Softcap))))
	}
	return x
}

func dot[A tensor.Float](x, y []A) A {
	var sum A
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

func axpy[A tensor.Float](a A, x, y []A) {
	for i := range y {
		y[i] += a * x[i]
	}
}

func scale[A tensor.Float](a A, y []A) {
	for i := range y {
		y[i] *= a
	}
}

func exp[A tensor.Float](x A) A { return A(math.Exp(float64(x))) }

// rowDot sets d [batch, seq, heads, 1] to the dot products of the rows of x and y.
func rowDot[A tensor.Float](d, x, y array[A]) {
	for i := range d.data {
		n := x.shape[tensor.Dim]
		d.data[i] = dot(x.data[i*n:(i+1)*n], y.data[i*n:(i+1)*n])
	}
}

// eachRow calls f for every batch, query and head with the keys that the query sees.
func eachRow[A tensor.Float](q, k array[A], visible func(i, j int) bool, f func(b, i, h int, keys []int)) {
	var keys []int
	for i := range q.shape[tensor.Seq] {
		keys = keys[:0]
		for j := range k.shape[tensor.Seq] {
			if visible(i, j) {
				keys = append(keys, j)
			}
		}
		for b := range q.shape[tensor.Batch] {
			for h := range q.shape[tensor.Heads] {
				f(b, i, h, keys)
			}
		}
	}
}

func add[A tensor.Float](dst, src View) {
	d, s := load[A](dst), load[A](src)
	axpy(1, s.data, d.data)
	d.store(dst)
}

func set(v View, x float64) {
	switch v.DType() {
	case tensor.F64:
		walk(v, func(y *float64) { *y = x })
	case tensor.F32:
		walk(v, func(y *float32) { *y = float32(x) })
	case tensor.F16, tensor.BF16:
		walk(v, func(y *uint16) { *y = 0 }) // Zero alone comes here
	default:
		panic(fmt.Sprintf("attention: %v is not of floats", v))
	}
}
