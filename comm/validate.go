package comm

import (
	"fmt"
	"unsafe"

	"github.com/cprun/cprun/internal/tensor"
)

// bytesOf is the memory of a view that a communicator can take.
func bytesOf(what string, v View) ([]byte, error) {
	switch {
	case v.IsZero():
		return nil, fmt.Errorf("%s is an empty View without memory", what)
	case v.DType() == tensor.Invalid:
		return nil, fmt.Errorf("%s has no element type", what)
	case !v.IsDense():
		return nil, fmt.Errorf("%s is not dense (%v): copy it to a dense view first", what, v)
	}
	if _, ok := v.Memory().(*tensor.Host); !ok {
		return nil, fmt.Errorf("%s is not host memory (%v): this group moves host memory only", what, v)
	}
	return tensor.Bytes(v), nil
}

// checkParts checks that whole is n parts like part.
func checkParts(wholeName string, whole View, partName string, part View, n int) error {
	if whole.DType() != part.DType() {
		return fmt.Errorf("%s is %s, %s is %s: both need one element type", wholeName, whole.DType(), partName, part.DType())
	}
	if whole.Size() != n*part.Size() {
		return fmt.Errorf("%s has %d elements, %s has %d: with %d ranks it needs %d",
			wholeName, whole.Size(), partName, part.Size(), n, n*part.Size())
	}
	return nil
}

func checkReduce(v View, op Op) error {
	if op < Sum || op > Min {
		return fmt.Errorf("reduction %d is unknown: use Sum, Max or Min", int(op))
	}
	if !reducible(v.DType()) {
		return fmt.Errorf("%s of %s: reductions know float32, float64, int64 and int32", op, v.DType())
	}
	return nil
}

// checkInPlace allows a part that lies in the whole as the rank's own part of it alone.
// Elsewhere it would be overwritten before it is sent, or overwrite what is still to be sent.
func checkInPlace(wholeName string, whole []byte, partName string, part []byte, rank int) error {
	if !overlap(whole, part) || unsafe.SliceData(whole[rank*len(part):]) == unsafe.SliceData(part) {
		return nil
	}
	return fmt.Errorf("%s lies in %s and is not part %d of it: only this rank's own part may", partName, wholeName, rank)
}

// overlap reports whether two buffers share memory.
func overlap(a, b []byte) bool {
	if len(a) == 0 || len(b) == 0 {
		return false
	}
	a0, b0 := uintptr(unsafe.Pointer(&a[0])), uintptr(unsafe.Pointer(&b[0]))
	return a0 < b0+uintptr(len(b)) && b0 < a0+uintptr(len(a))
}
