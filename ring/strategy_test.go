package ring_test

import (
	"strings"
	"testing"

	"github.com/cprun/cprun/ring"
)

func TestStrategyIsReadable(t *testing.T) {
	for want, s := range map[string]ring.Strategy{
		"hierarchical (inner 4), zigzag, flash": {Layout: "zigzag", Algorithm: "hierarchical", Inner: 4, Backend: "flash"},
		"gather_heads 2":                        {Algorithm: "allgather", GatherHeads: 2},
		"allgather (before), contiguous, fused": {Layout: "contiguous", Algorithm: "allgather", Gather: ring.Before, Backend: "fused"},
		"ring, document, flash":                 {Layout: "document", Algorithm: "ring", Gather: ring.Auto, Backend: "flash"},
	} {
		if got := s.String(); !strings.Contains(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if s := (ring.Strategy{Algorithm: "hierarchical", Inner: 2}); s.UlyssesDegree(8) != 2 || s.When() != ring.Beside {
		t.Errorf("%d ranks exchange heads, rows travel %s", s.UlyssesDegree(8), s.When())
	}
}
