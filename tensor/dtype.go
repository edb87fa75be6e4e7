package tensor

import "fmt"

// DType is the element type of a View.
type DType uint8

// The element types that cprun computes with or moves. The zero value is invalid, so that an unset View is noticed.
const (
	Invalid DType = iota
	F64
	F32
	F16
	BF16
	I64
	I32
	U8
)

var dtypeInfo = [...]struct {
	name string
	size int
}{
	Invalid: {"invalid", 0}, F64: {"float64", 8}, F32: {"float32", 4}, F16: {"float16", 2},
	BF16: {"bfloat16", 2}, I64: {"int64", 8}, I32: {"int32", 4}, U8: {"uint8", 1},
}

// Size returns the bytes of one element.
func (d DType) Size() int { return dtypeInfo[d].size }

func (d DType) String() string {
	if int(d) >= len(dtypeInfo) {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypeInfo[d].name
}

// Element is a Go type that a host View can be read as.
type Element interface {
	~float64 | ~float32 | ~uint16 | ~int64 | ~int32 | ~uint8
}

// Float is an element type that the CPU computes in.
type Float interface{ ~float64 | ~float32 }

// typeOf returns the DType with host representation T. F16 and BF16 share uint16 in memory and have no Go type, so it
// does not return them.
func typeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case float64:
		return F64
	case float32:
		return F32
	case int64:
		return I64
	case int32:
		return I32
	case uint8:
		return U8
	}
	return Invalid
}
