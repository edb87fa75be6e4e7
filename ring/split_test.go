package ring

import (
	"testing"

	"github.com/cprun/cprun/partition"
)

// The last call of a split backward pass runs beside the own gradients on their way home, and forward passes stay whole.
func TestSplitEndsBesideGradientsOnTheirWay(t *testing.T) {
	const ranks, rows = 4, 32
	for _, algorithm := range []string{"ring", "allgather"} {
		for rank := range ranks {
			spec := Spec{Shape: causalShape(ranks*rows, ranks, partition.Zigzag{}, -1)}
			whole := Must(New(algorithm, spec, rank))
			spec.Split = true
			s := Must(New(algorithm, spec, rank))
			first, last := s.Backward[0], s.Backward[len(s.Backward)-1]
			if len(last.RecvGrad) == 0 || len(last.Tiles) != 1 || !last.Last || !last.Ends || last.Grads != whole.Backward[0].Grads {
				t.Errorf("%s, rank %d: the last hop is %+v", algorithm, rank, last)
			}
			if len(first.RecvKV) == 0 || len(first.Tiles) != 1 || first.Tiles[0].Q.Hi != rows/2 || first.Grads.Hi != last.Held {
				t.Errorf("%s, rank %d: the first hop is %+v", algorithm, rank, first)
			}
			if len(s.Forward) != len(whole.Forward) || s.Forward[0].Tiles[0] != whole.Forward[0].Tiles[0] {
				t.Errorf("%s, rank %d: forward %+v", algorithm, rank, s.Forward)
			}
		}
	}
}
