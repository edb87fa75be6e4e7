package attention

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/tensor"
)

// array is a dense copy of a host view in the arithmetic type A.
type array[A tensor.Float] struct {
	shape [4]int
	data  []A
}

// row is the elements of [b, s, h, :].
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
