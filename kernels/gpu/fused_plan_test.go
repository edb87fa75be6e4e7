package gpu

import (
	"fmt"
	"testing"
)

// TestFusedPackedGrads holds which head dims have packed gradients, and that memory for the
// gradients of every query head, which only packed calls take, is planned for these alone.
func TestFusedPackedGrads(t *testing.T) {
	for _, c := range []struct {
		dim, dimV int
		packed    bool
	}{
		{16, 16, true}, {64, 64, true}, {80, 80, true}, {112, 112, true}, {128, 128, true}, {192, 128, true}, {192, 192, true},
		{72, 72, false}, {88, 88, false}, {104, 104, false}, {120, 120, false}, {120, 128, false}, {128, 120, false},
		{200, 200, false}, {208, 128, false}, {256, 256, false},
	} {
		t.Run(fmt.Sprintf("head dims %d and %d", c.dim, c.dimV), func(t *testing.T) {
			if got := defaultPacking.grads(c.dim, c.dimV); got != c.packed {
				t.Errorf("packed: %t, want %t", got, c.packed)
			}
			s := FusedShape{Batch: 1, SeqQ: 4096, SeqK: 4096, Heads: 8, KVHeads: 2, Dim: c.dim, DimV: c.dimV, Calls: 1, Training: true}
			want := FusedWorkspace(s)
			if c.packed {
				want += 4096 * 8 * int64(4*(c.dim+c.dimV))
			}
			s.Packed = true
			if got := FusedWorkspace(s); got != want {
				t.Errorf("a workspace of %d bytes, want %d", got, want)
			}
		})
	}
}
