package near

import (
	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/tensor"
)

// Encode writes xs, rounded, into a host view.
func Encode(v tensor.View, xs []float64) {
	if !v.IsDense() {
		dense := denseLike(v)
		Encode(dense, xs)
		tensor.Copy(v, dense)
		return
	}
	switch v.DType() {
	case tensor.F64:
		encode(v, xs, func(x float64) float64 { return x })
	case tensor.F32:
		encode(v, xs, func(x float64) float32 { return float32(x) })
	case tensor.BF16:
		encode(v, xs, func(x float64) uint16 { return half.ToBF16(float32(x)) })
	case tensor.F16:
		encode(v, xs, func(x float64) uint16 { return half.ToF16(float32(x)) })
	}
}

func encode[T tensor.Element](v tensor.View, xs []float64, round func(float64) T) {
	data := tensor.Data[T](v)
	for i, x := range xs {
		data[i] = round(x)
	}
}

// Decode returns the values of a host view.
func Decode(v tensor.View) []float64 {
	if !v.IsDense() {
		dense := denseLike(v)
		tensor.Copy(dense, v)
		v = dense
	}
	switch v.DType() {
	case tensor.F64:
		return decode(v, func(x float64) float64 { return x })
	case tensor.F32:
		return decode(v, func(x float32) float64 { return float64(x) })
	case tensor.BF16:
		return decode(v, func(x uint16) float64 { return float64(half.FromBF16(x)) })
	case tensor.F16:
		return decode(v, func(x uint16) float64 { return float64(half.FromF16(x)) })
	}
	return make([]float64, v.Size())
}

func decode[T tensor.Element](v tensor.View, value func(T) float64) []float64 {
	xs := make([]float64, v.Size())
	for i, x := range tensor.Data[T](v) {
		xs[i] = value(x)
	}
	return xs
}

func denseLike(v tensor.View) tensor.View {
	shape := v.Shape()
	return tensor.New(v.DType(), shape[:]...)
}

// Round returns x rounded to t. If t has 16 bits, it rounds to float32 first, as kernels do.
func Round(x float64, t tensor.DType) float64 {
	switch t {
	case tensor.F32:
		return float64(float32(x))
	case tensor.BF16:
		return float64(half.FromBF16(half.ToBF16(float32(x))))
	case tensor.F16:
		return float64(half.FromF16(half.ToF16(float32(x))))
	}
	return x
}
