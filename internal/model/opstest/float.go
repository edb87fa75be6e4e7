package opstest

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/tensor"
)

// epsilon returns the largest relative error of rounding to dtype.
func epsilon(dtype tensor.DType) float64 {
	switch dtype {
	case tensor.F64:
		return 0x1p-53
	case tensor.F32:
		return 0x1p-24
	case tensor.F16:
		return 0x1p-11
	case tensor.BF16:
		return 0x1p-8
	}
	panic(fmt.Sprintf("opstest: epsilon of %v", dtype))
}

// encode writes xs, rounded, into a dense host view.
func encode(v View, xs []float64) {
	for i, x := range xs {
		switch v.DType() {
		case tensor.F64:
			tensor.Data[float64](v)[i] = x
		case tensor.F32:
			tensor.Data[float32](v)[i] = float32(x)
		case tensor.BF16:
			x = float64(float32(x))
			tensor.Data[uint16](v)[i] = uint16(math.Float32bits(float32(round(x, 8, -126))) >> 16)
		case tensor.F16:
			x = float64(float32(x))
			tensor.Data[uint16](v)[i] = halfBits(round(x, 11, -14))
		}
	}
}

func decode(v View) []float64 {
	xs := make([]float64, v.Size())
	for i := range xs {
		switch v.DType() {
		case tensor.F64:
			xs[i] = tensor.Data[float64](v)[i]
		case tensor.F32:
			xs[i] = float64(tensor.Data[float32](v)[i])
		case tensor.BF16:
			xs[i] = float64(math.Float32frombits(uint32(tensor.Data[uint16](v)[i]) << 16))
		case tensor.F16:
			xs[i] = halfValue(tensor.Data[uint16](v)[i])
		}
	}
	return xs
}

// round returns x with so many bits, ties to even; below 2^minExp it is a multiple of the step
// there, which makes subnormals.
func round(x float64, bits, minExp int) float64 {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return x
	}
	_, exp := math.Frexp(x) // |x| in [2^(exp-1), 2^exp)
	step := math.Ldexp(1, max(exp-1, minExp)-(bits-1))
	return math.Copysign(math.RoundToEven(x/step)*step, x)
}

// halfBits returns a float16 that x, already rounded, is exactly; from 65536 on it is infinite. It and
// halfValue are not those of package tensor, so that a fault there shows.
func halfBits(x float64) uint16 {
	sign := uint16(0)
	if math.Signbit(x) {
		sign = 0x8000
	}
	abs := math.Abs(x)
	switch {
	case math.IsNaN(x):
		return 0x7e00
	case abs >= 65536:
		return sign | 0x7c00
	case abs < 0x1p-14:
		return sign | uint16(abs*0x1p24)
	}
	frac, exp := math.Frexp(abs) // abs = frac * 2^exp, frac in [0.5, 1)
	return sign | uint16(exp+14)<<10 | uint16(frac*2048)&0x3ff
}

func halfValue(h uint16) float64 {
	for _, sign := range []float64{1, -1} {
		exp, frac := int(h>>10&31), float64(h&1023)
		if (sign < 0) != (h>>15 == 1) {
			continue
		}
		switch {
		case exp == 31 && frac != 0:
			return math.NaN()
		case exp == 31:
			return math.Inf(int(sign))
		case exp == 0:
			return math.Copysign(frac*0x1p-24, sign)
		}
		return sign * (1 + frac/1024) * math.Ldexp(1, exp-15)
	}
	return 0
}
