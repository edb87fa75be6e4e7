package train

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/cprun/cprun/internal/model/checkpoint"
)

// No checkpoint is written of a state that is not finite, from a copy or in pieces, wherever the value is.
func TestCheckpointsAreFinite(t *testing.T) {
	const n = checkpoint.PieceSize + 3
	for _, x := range []float64{0, -math.MaxFloat32, math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, at := range []int{0, n - 1} {
			data := make([]float32, n)
			data[at] = float32(x)
			copied := checkpoint.Snapshot{Fields: []checkpoint.Field{{Name: "param"}, {Name: "exp_avg", Data: data}}}
			pieces := checkpoint.Snapshot{Fields: []checkpoint.Field{{Name: "param"}}, Ranges: []checkpoint.Range{{Lo: 4,
				Hi: n + 4}}, Read: func(_ context.Context, _ int, lo int64, dst []float32) error {
				copy(dst, data[lo:])
				return nil
			}}
			bad := math.IsNaN(x) || math.IsInf(x, 0)
			for _, s := range []checkpoint.Snapshot{copied, pieces} {
				if err := checkFinite(t.Context(), s); errors.Is(err, errDiverged) != bad || !bad && err != nil {
					t.Errorf("element %d of %d is %v: %v", at, n, x, err)
				}
			}
		}
	}
}
