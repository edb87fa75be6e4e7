package attention

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/internal/tensor"
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

// load copies a view of any float type.
func load[A tensor.Float](v View) array[A] {
	switch v.DType() {
	case tensor.F64:
		return loadAs(v, func(x float64) A { return A(x) })
	case tensor.F32:
		return loadAs(v, func(x float32) A { return A(x) })
	case tensor.BF16:
		return loadAs(v, func(x uint16) A { return A(math.Float32frombits(uint32(x) << 16)) })
	case tensor.F16:
		return loadAs(v, func(x uint16) A { return A(half(x)) })
	}
	panic(fmt.Sprintf("attention: %v is not of floats", v))
}

func loadAs[A tensor.Float, T tensor.Element](v View, convert func(T) A) array[A] {
	a := array[A]{shape: v.Shape(), data: make([]A, 0, v.Size())}
	walk(v, func(x *T) { a.data = append(a.data, convert(*x)) })
	return a
}

// store copies a back to the view that it was loaded from, which is float32 or float64.
func (a array[A]) store(v View) {
	i := 0
	switch v.DType() {
	case tensor.F64:
		walk(v, func(x *float64) { *x = float64(a.data[i]); i++ })
	case tensor.F32:
		walk(v, func(x *float32) { *x = float32(a.data[i]); i++ })
	default:
		panic(fmt.Sprintf("attention: accumulator %v", v))
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

// half is the value of an IEEE 754 binary16: 1 sign, 5 exponent, 10 mantissa bits.
func half(x uint16) float64 {
	exponent, mantissa := int(x>>10)&31, float64(x&1023)
	var y float64
	switch exponent {
	case 0: // subnormal
		y = math.Ldexp(mantissa, -24)
	case 31:
		y = math.Inf(1)
		if mantissa != 0 {
			y = math.NaN()
		}
	default:
		y = math.Ldexp(1024+mantissa, exponent-25)
	}
	if x>>15 != 0 {
		return -y
	}
	return y
}
