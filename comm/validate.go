package comm

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/internal/tensor"
)

// checkView checks what holds for views of every device.
func checkView(what string, v View) error {
	switch {
	case v.IsZero():
		return fmt.Errorf("%s is an empty View without memory", what)
	case v.DType() == tensor.Invalid:
		return fmt.Errorf("%s has no element type", what)
	case !v.IsDense():
		return fmt.Errorf("%s is not dense (%v): copy it to a dense view first", what, v)
	}
	return nil
}

// bytesOf is the memory of a view that a communicator can take.
func bytesOf(what string, v View) ([]byte, error) {
	if err := checkView(what, v); err != nil {
		return nil, err
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

// checkAllToAll checks that both views are n equal parts.
func checkAllToAll(dst, src View, n int) error {
	if dst.DType() != src.DType() || dst.Size() != src.Size() {
		return fmt.Errorf("dst is %d elements of %s, src %d of %s: both need one size and type", dst.Size(), dst.DType(), src.Size(), src.DType())
	}
	if src.Size()%n != 0 {
		return fmt.Errorf("src has %d elements: it needs a multiple of the %d ranks", src.Size(), n)
	}
	return nil
}

// errOverlap is what an all-to-all in place gets.
var errOverlap = errors.New("dst and src share memory: parts would be overwritten before they are sent")

func checkRoot(root, n int) error {
	if root < 0 || root >= n {
		return fmt.Errorf("root %d of a group of %d", root, n)
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

// span is the memory of a dense view, as addresses of whatever device it lies on.
type span struct{ lo, hi uintptr }

func spanOf(v View) span {
	size := int64(v.DType().Size())
	lo := uintptr(v.Memory().Ptr()) + uintptr(v.Offset()*size)
	return span{lo, lo + uintptr(int64(v.Size())*size)}
}

// overlaps reports whether two views share memory.
func (s span) overlaps(t span) bool { return s.lo < s.hi && t.lo < t.hi && s.lo < t.hi && t.lo < s.hi }

// checkInPlace allows a part that lies in the whole as the rank's own part of it alone.
// Elsewhere it would be overwritten before it is sent, or overwrite what is still to be sent.
func checkInPlace(wholeName string, whole View, partName string, part View, rank int) error {
	w, p := spanOf(whole), spanOf(part)
	if !w.overlaps(p) || p.lo == w.lo+uintptr(rank)*(p.hi-p.lo) {
		return nil
	}
	return fmt.Errorf("%s lies in %s and is not part %d of it: only this rank's own part may", partName, wholeName, rank)
}
