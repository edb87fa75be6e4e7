package attention_test

import (
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Whole panics for a mask or a scale that is not set, which would be another attention.
func TestWholeNeedsAMaskAndAScale(t *testing.T) {
	x := tensor.New(tensor.F64, 1, 3, 1, 2)
	for name, c := range map[string]struct {
		mask   partition.Mask
		p      attention.Softmax
		panics bool
	}{
		"set":      {partition.Mask{Band: partition.Full()}, attention.Softmax{Scale: 1}, false},
		"no mask":  {partition.Mask{}, attention.Softmax{Scale: 1}, true},
		"no scale": {partition.Mask{Band: partition.Full()}, attention.Softmax{}, true},
	} {
		func() {
			defer func() {
				if p := recover(); (p != nil) != c.panics {
					t.Errorf("%s: %v", name, p)
				}
			}()
			attention.Whole[float64](x, x, x, x, c.mask, c.p)
		}()
	}
}
