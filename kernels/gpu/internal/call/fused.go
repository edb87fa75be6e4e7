package call

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/tensor"
)

// FusedTrains returns an error if an element of q, o or do is beyond 32-bit offsets, where cuDNN's gradients are wrong.
// The rule fused-training-offsets of internal/model/backends keeps runs from it.
func FusedTrains(views ...View) error {
	for _, v := range views {
		last := int64(0)
		for a := tensor.Batch; a <= tensor.Dim; a++ {
			last += int64(v.Len(a)-1) * v.Stride(a)
		}
		if last >= math.MaxInt32 {
			return fmt.Errorf("fused attention backward: %v: with 2^31 elements or more, cuDNN's gradients of q and k are "+
				"wrong; use the flash backend, or more ranks", v)
		}
	}
	return nil
}
