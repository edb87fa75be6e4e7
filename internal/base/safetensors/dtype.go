package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/tensor"
)

// DType is an element type, as the header spells it.
type DType string

// The element types that this package names. It recognises the other types of the format also, so that files with them
// open, and tensors can be read as bytes.
const (
	F64    DType = "F64"
	F32    DType = "F32"
	F16    DType = "F16"
	BF16   DType = "BF16"
	F8E4M3 DType = "F8_E4M3" // 4 exponent bits, 3 of fraction, no infinity (arXiv:2209.05433)
	F8E5M2 DType = "F8_E5M2"
	I64    DType = "I64"
	I32    DType = "I32"
	U32    DType = "U32"
	U16    DType = "U16"
	U8     DType = "U8"
	Bool   DType = "BOOL"
)

type dtypeInfo struct {
	name DType
	bits int64
}

// dtypes lists all types of the format, in the reference implementation's order. Its writer puts tensors of later types
// first.
var dtypes = []dtypeInfo{
	{Bool, 8}, {"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {U8, 8}, {"I8", 8},
	{F8E5M2, 8}, {F8E4M3, 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
	{"I16", 16}, {U16, 16}, {F16, 16}, {BF16, 16}, {I32, 32}, {U32, 32}, {F32, 32},
	{"C64", 64}, {F64, 64}, {I64, 64}, {"U64", 64},
}

// rank returns the index of a type in dtypes, or -1.
func (d DType) rank() int {
	return slices.IndexFunc(dtypes, func(i dtypeInfo) bool { return i.name == d })
}

// Known reports whether the format has this type.
func (d DType) Known() bool { return d.rank() >= 0 }

// Bits returns the size of one element; 0 for an unknown type.
func (d DType) Bits() int64 {
	if r := d.rank(); r >= 0 {
		return dtypes[r].bits
	}
	return 0
}

var tensors = map[DType]tensor.DType{
	F64: tensor.F64, F32: tensor.F32, F16: tensor.F16, BF16: tensor.BF16, I64: tensor.I64, I32: tensor.I32, U8: tensor.U8,
}

// Tensor returns the tensor type with the same elements, or Invalid.
func (d DType) Tensor() tensor.DType { return tensors[d] }

// F8E4M3ToF32 converts exactly. The type has NaN (all ones) and no infinity.
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

// Float is the constraint of floating point elements.
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
		return fmt.Errorf("elements of type %s do not convert to floating point; "+
			"F64, F32, F16, BF16, F8_E4M3 and F8_E5M2 do", d)
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
