package device

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/tensor"
)

// A kernel clears its workspace exactly if the choice of the backend counts on it.
func TestZeroWorkspaceAgreesWithTheRules(t *testing.T) {
	for _, arch := range []int{90, 100} {
		for _, cudnn := range []backends.Version{backends.V(9, 17, 0), backends.V(9, 18, 1)} {
			for _, packed := range []bool{false, true} {
				c, err := backends.Select(backends.Params{Arch: arch, CUDNN: cudnn, Want: backends.Fused, DType: tensor.BF16,
					Batch: 1, SeqQ: 256, SeqKV: 256, Heads: 2, KVHeads: 2, HeadDim: 64, HeadDimV: 64, Causal: true,
					WindowLeft: -1, Documents: packed, Training: true})
				if err != nil {
					t.Fatal(err)
				}
				want := slices.ContainsFunc(c.Remedies, func(a backends.Applied) bool {
					return a.Kind == backends.ZeroWorkspace
				})
				o := CUDAOptions{Machine: machine.Machine{Arch: arch, CUDNN: cudnn}, Packed: packed}
				if got := o.zeroWorkspace(); got != want {
					t.Errorf("sm%d, cuDNN %s, packed %t: cleared %t, by the rules %t", arch, cudnn, packed, got, want)
				}
			}
		}
	}
}
