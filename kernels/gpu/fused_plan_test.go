package gpu

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/tensor"
)

// trainingShape returns the shape of training with one call over a sequence.
func trainingShape(seq, heads, kvHeads, dim, dimV int) FusedShape {
	return FusedShape{Batch: 1, SeqQ: seq, SeqK: seq, Heads: heads, KVHeads: kvHeads, Dim: dim, DimV: dimV, Calls: 1,
		Training: true}
}

// TestFusedPackedGrads checks which head dims have packed gradients, and that plans include memory for the gradients of
// every query head only for these.
func TestFusedPackedGrads(t *testing.T) {
	for _, c := range []struct {
		dim, dimV int
		packed    bool
	}{
		{16, 16, true}, {64, 64, true}, {80, 80, true}, {112, 112, true}, {128, 128, true}, {192, 128, true},
		{192, 192, true},
		{72, 72, false}, {88, 88, false}, {104, 104, false}, {120, 120, false}, {120, 128, false}, {128, 120, false},
		{200, 200, false}, {208, 128, false}, {256, 256, false},
	} {
		t.Run(fmt.Sprintf("head dims %d and %d", c.dim, c.dimV), func(t *testing.T) {
			if got := defaultPacking.grads(c.dim, c.dimV); got != c.packed {
				t.Errorf("packed: %t, want %t", got, c.packed)
			}
			s := trainingShape(4096, 8, 2, c.dim, c.dimV)
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

// TestWorkspacesAgree checks that the reserved workspace equals the estimate of package backends, or is at least that
// for packed documents, whose lengths are rounded up.
func TestWorkspacesAgree(t *testing.T) {
	for _, dim := range []int{64, 128, 256} {
		for _, kvHeads := range []int{2, 8} {
			for _, seq := range []int{1000, 8192, 32768} {
				s := trainingShape(seq, 8, kvHeads, dim, dim)
				for _, s.Deterministic = range []bool{false, true} {
					if got, want := backwardWorkspace(s), chosenWorkspace(t, s); got != want {
						t.Errorf("%+v: %d bytes are reserved, the choice says %d", s, got, want)
					}
				}
				s.Packed, s.Deterministic = true, false
				if got, want := backwardWorkspace(s), chosenWorkspace(t, s); defaultPacking.grads(dim, dim) &&
					got < want {
					t.Errorf("%+v: %d bytes are reserved, the choice says %d", s, got, want)
				}
			}
		}
	}
}

// chosenWorkspace returns the estimate of internal/model/backends for a shape on Hopper.
func chosenWorkspace(t *testing.T, s FusedShape) int64 {
	t.Helper()
	c, err := backends.Select(backends.Params{
		Arch: 90, CUDNN: backends.V(9, 19, 0), Want: backends.Fused, DType: tensor.BF16,
		Batch: s.Batch, SeqQ: s.SeqQ, SeqKV: s.SeqK, Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.Dim, HeadDimV: s.DimV,
		Causal: true, WindowLeft: -1, Documents: s.Packed, Training: s.Training, Deterministic: s.Deterministic,
	})
	if err != nil {
		t.Fatal(err)
	}
	return c.Workspace()
}

// TestDeterministicWorkspace: as measured, a deterministic call at 32K needs more than 69,147,295,744 bytes on H200
// with cuDNN 9.19.0, and less than 103,720,943,616, the request at that time.
func TestDeterministicWorkspace(t *testing.T) {
	s := trainingShape(32768, 32, 8, 128, 128)
	s.Deterministic = true
	if got := FusedWorkspace(s); got <= 69147295744 || got >= 103720943616 {
		t.Errorf("a workspace of %d bytes", got)
	}
}

func TestGrownScratch(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct{ size, need, want int64 }{
		{0, 7, 7}, {100 * mib, 101 * mib, 150 * mib}, {100 * mib, 200 * mib, 200 * mib},
		{69147295744, 69147295744 + mib, 69147295744 + 257*mib},
	} {
		if got := grownScratch(c.size, c.need); got != c.want {
			t.Errorf("%d bytes become %d for %d, want %d", c.size, got, c.need, c.want)
		}
	}
}
