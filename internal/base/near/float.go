package near

import (
	"math"

	"github.com/cprun/cprun/tensor"
)

// These conversions do not use those of package half, so that tests detect errors there.

// Encode writes xs, rounded, into a dense host view.
func Encode(v tensor.View, xs []float64) {
	for i, x := range xs {
		x = Round(x, v.DType())
		switch v.DType() {
		case tensor.F64:
			tensor.Data[float64](v)[i] = x
		case tensor.F32:
			tensor.Data[float32](v)[i] = float32(x)
		case tensor.BF16:
			tensor.Data[uint16](v)[i] = uint16(math.Float32bits(float32(x)) >> 16)
		case tensor.F16:
			tensor.Data[uint16](v)[i] = halfBits(x)
		}
	}
}

// Round returns x rounded to t. If t has 16 bits, it rounds to float32 first, as kernels do. A float16 may become 65536
// or more, which Encode writes as an infinity.
func Round(x float64, t tensor.DType) float64 {
	switch t {
	case tensor.F32:
		return float64(float32(x))
	case tensor.BF16:
		return round(float64(float32(x)), 8, -126)
	case tensor.F16:
		return round(float64(float32(x)), 11, -14)
	}
	return x
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
			xs[i] = float64(math.Float32frombits(uint32(tensor.Data[uint16](v)[i]) << 16))
		case tensor.F16:
			xs[i] = halfValue(tensor.Data[uint16](v)[i])
		}
	}
	return xs
}

// round rounds x to the given number of bits, ties to even. Below 2^minExp, results are subnormal: multiples of the
// step at 2^minExp.
func round(x float64, bits, minExp int) float64 {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return x
	}
	_, exp := math.Frexp(x) // |x| in [2^(exp-1), 2^exp)
	step := math.Ldexp(1, max(exp-1, minExp)-(bits-1))
	return math.Copysign(math.RoundToEven(x/step)*step, x)
}

// halfBits returns the float16 of x, which must be exact or at least 65536, which becomes infinite.
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
