package cpu

import (
	"unsafe"

	"github.com/cprun/cprun/tensor"
)

// aligned is s from its first whole cache line on, which is less than pieceUnit elements away.
func aligned[T tensor.Float](s []T) []T {
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(s))) % lineBytes)
	if off == 0 {
		return s
	}
	return s[(lineBytes-off)/int(unsafe.Sizeof(T(0))):]
}
