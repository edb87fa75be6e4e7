package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/cprun/cprun/internal/base/half"
)

// F8E4M3ToF32 converts exactly; the type has NaN (all ones) and no infinity.
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

// F8E5M2ToF32 converts exactly: the type is the upper half of a float16.
func F8E5M2ToF32(b uint8) float32 { return half.FromF16(uint16(b) << 8) }

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
			dst[i] = T(half.FromF16(le.Uint16(src[2*i:])))
		}
	case BF16:
		for i := range dst {
			dst[i] = T(half.FromBF16(le.Uint16(src[2*i:])))
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
		return fmt.Errorf("elements of type %s do not convert to floating point; F64, F32, F16, BF16, F8_E4M3 and F8_E5M2 do",
			d)
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
			dst = le.AppendUint16(dst, half.ToF16(float32(x)))
		}
	case BF16:
		for _, x := range src {
			dst = le.AppendUint16(dst, half.ToBF16(float32(x)))
		}
	default:
		return nil, fmt.Errorf("floating point elements are written as F64, F32, F16 or BF16, not as %q", d)
	}
	return dst, nil
}
