package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"
)

// BF16ToF32 is exact: bfloat16 is the upper half of a float32.
func BF16ToF32(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// F32ToBF16 rounds to nearest, ties to even. A NaN stays a NaN, with its sign.
func F32ToBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 {
		// The payload may lie in the half that is cut off; the quiet bit keeps it a NaN.
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// F16ToF32 is exact.
func F16ToF32(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exp, frac := uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exp {
	case 0: // zero or subnormal: frac * 2^-24
		x := float32(frac) * 0x1p-24
		return math.Float32frombits(math.Float32bits(x) | sign)
	case 31: // infinity or NaN
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

// F32ToF16 rounds to nearest, ties to even; what is too large becomes infinity. A NaN stays
// a NaN, with its sign.
func F32ToF16(x float32) uint16 {
	b := math.Float32bits(x)
	sign, abs := uint16(b>>16&0x8000), b&0x7fffffff
	switch {
	case abs > 0x7f800000:
		return sign | 0x7e00 | uint16(abs>>13&0x3ff)
	case abs >= 0x477ff000: // 65520 and above round to infinity
		return sign | 0x7c00
	case abs < 0x38800000: // below 2^-14: subnormal, a multiple of 2^-24
		// Adding 0.5 puts the unit of float32 at 2^-24, so the addition rounds.
		f := math.Float32frombits(abs) + 0.5
		return sign | uint16(math.Float32bits(f)-0x3f000000)
	}
	abs -= (127 - 15) << 23
	return sign | uint16((abs+0xfff+abs>>13&1)>>13)
}

// F8E4M3ToF32 is exact; the type has NaN (all ones) and no infinity.
func F8E4M3ToF32(b uint8) float32 {
	exp, frac := int(b>>3&0xf), float64(b&7)
	var x float64
	switch {
	case b&0x7f == 0x7f:
		x = math.NaN()
	case exp == 0:
		x = math.Ldexp(frac, -9)
	default:
		x = math.Ldexp(8+frac, exp-10)
	}
	if b&0x80 != 0 {
		x = math.Copysign(x, -1)
	}
	return float32(x)
}

// F8E5M2ToF32 is exact: the type is the upper half of a float16.
func F8E5M2ToF32(b uint8) float32 { return F16ToF32(uint16(b) << 8) }

// Float is what a tensor of floating point numbers is read as.
type Float interface{ float32 | float64 }

// decode converts len(dst) elements of src to T.
func decode[T Float](dst []T, src []byte, d DType) error {
	le := binary.LittleEndian
	switch d {
	case F64:
		for i := range dst {
			dst[i] = T(math.Float64frombits(le.Uint64(src[8*i:])))
		}
	case F32:
		for i := range dst {
			dst[i] = T(math.Float32frombits(le.Uint32(src[4*i:])))
		}
	case F16:
		for i := range dst {
			dst[i] = T(F16ToF32(le.Uint16(src[2*i:])))
		}
	case BF16:
		for i := range dst {
			dst[i] = T(BF16ToF32(le.Uint16(src[2*i:])))
		}
	case F8E4M3:
		for i := range dst {
			dst[i] = T(F8E4M3ToF32(src[i]))
		}
	case F8E5M2:
		for i := range dst {
			dst[i] = T(F8E5M2ToF32(src[i]))
		}
	default:
		return fmt.Errorf("elements of type %s do not convert to floating point; F64, F32, F16, BF16, F8_E4M3 and F8_E5M2 do", d)
	}
	return nil
}

// encode appends the elements of src as type d.
func encode[T Float](dst []byte, src []T, d DType) ([]byte, error) {
	le := binary.LittleEndian
	switch d {
	case F64:
		for _, x := range src {
			dst = le.AppendUint64(dst, math.Float64bits(float64(x)))
		}
	case F32:
		for _, x := range src {
			dst = le.AppendUint32(dst, math.Float32bits(float32(x)))
		}
	case F16:
		for _, x := range src {
			dst = le.AppendUint16(dst, F32ToF16(float32(x)))
		}
	case BF16:
		for _, x := range src {
			dst = le.AppendUint16(dst, F32ToBF16(float32(x)))
		}
	default:
		return nil, fmt.Errorf("floating point elements are written as F64, F32, F16 or BF16, not as %q", d)
	}
	return dst, nil
}
