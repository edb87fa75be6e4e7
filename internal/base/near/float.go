package near

import (
	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/tensor"
)

// Encode writes xs, rounded, into a dense host view.
func Encode(v tensor.View, xs []float64) {
	for i, x := range xs {
		switch v.DType() {
		case tensor.F64:
			tensor.Data[float64](v)[i] = x
		case tensor.F32:
			tensor.Data[float32](v)[i] = float32(x)
		case tensor.BF16:
			tensor.Data[uint16](v)[i] = half.ToBF16(float32(x))
		case tensor.F16:
			tensor.Data[uint16](v)[i] = half.ToF16(float32(x))
		}
	}
}

// Decode returns the values of a dense host view.
func Decode(v tensor.View) []float64 {
	xs := make([]float64, v.Size())
	for i := range xs {
		switch v.DType() {
		case tensor.F64:
			xs[i] = tensor.Data[float64](v)[i]
		case tensor.F32:
			xs[i] = float64(tensor.Data[float32](v)[i])
		case tensor.BF16:
			xs[i] = float64(half.FromBF16(tensor.Data[uint16](v)[i]))
		case tensor.F16:
			xs[i] = float64(half.FromF16(tensor.Data[uint16](v)[i]))
		}
	}
	return xs
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
