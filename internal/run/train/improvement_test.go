package train

import (
	"math"
	"testing"
)

// An improvement is below the lowest loss by more than min_delta. A loss that is not finite is none.
func TestImprovements(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, tc := range []struct {
		delta  float64
		losses []float64
		want   []int
	}{
		{0, []float64{2, 2, 1, 3, 1.5, 0.5}, []int{0, 1, 0, 1, 2, 0}},
		{0.5, []float64{2, 1.5, 1.25, 0.5}, []int{0, 1, 2, 0}},
		{0, []float64{nan, inf, 2, nan, 1}, []int{1, 2, 0, 1, 0}},
	} {
		var e earlyStop
		for i, loss := range tc.losses {
			if e.add(loss, tc.delta); e.Since != tc.want[i] {
				t.Errorf("%v by %v: %d after the loss %v, want %d", tc.losses, tc.delta, e.Since, loss, tc.want[i])
			}
		}
	}
}
