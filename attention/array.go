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

// store copies a to a view of its shape, of any float type.
func (a array[A]) store(v View) {
	i := 0
	switch v.DType() {
	case tensor.F64:
		walk(v, func(x *float64) { *x = float64(a.data[i]); i++ })
	case tensor.F32:
		walk(v, func(x *float32) { *x = float32(a.data[i]); i++ })
	case tensor.BF16:
		walk(v, func(x *uint16) { *x = bfloat(float32(a.data[i])); i++ })
	case tensor.F16:
		walk(v, func(x *uint16) { *x = halfOf(float64(a.data[i])); i++ })
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

// bfloat is the bfloat16 nearest to x, ties to even. NaN stays one.
func bfloat(x float32) uint16 {
	bits := math.Float32bits(x)
	if x != x {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// halfOf is the binary16 nearest to x, ties to even.
func halfOf(x float64) uint16 {
	sign := uint16(math.Float64bits(x) >> 48 & 0x8000)
	x = math.Abs(x)
	switch {
	case math.IsNaN(x):
		return sign | 0x7e00
	case x >= 65520:
		return sign | 0x7c00
	case x < math.Ldexp(1, -14): // the steps of subnormals; 1024 of them is the first normal
		return sign | uint16(math.RoundToEven(math.Ldexp(x, 24)))
	}
	fraction, exponent := math.Frexp(x) // x = fraction 2^exponent, fraction in [1/2, 1)
	mantissa := uint16(math.RoundToEven(math.Ldexp(fraction, 11))) - 1024
	return sign | (uint16(exponent+14)<<10 + mantissa) // a mantissa of 1024 carries into the exponent
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
