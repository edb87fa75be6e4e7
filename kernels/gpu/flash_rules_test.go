package gpu

import (
	"errors"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// sharedPerBlock maps architectures to the largest shared memory of a block, in bytes, from the table of technical
// specifications in the CUDA programming guide.
var sharedPerBlock = map[int]int{
	80: 163 << 10, 86: source.SmallShared, 87: 163 << 10, 89: source.SmallShared,
	90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10, 120: source.SmallShared, 121: source.SmallShared,
}

// TestFlashRules checks that the rules reject exactly the head dims without a compiled shape, on every architecture,
// forward and backward.
func TestFlashRules(t *testing.T) {
	passes := map[string]func(source.FlashShape) int{
		"forward": source.FlashShape.ForwardShared, "backward": source.FlashShape.BackwardShared,
		"dq": source.FlashShape.DQShared,
	}
	for arch, shared := range sharedPerBlock {
		for _, dtype := range []tensor.DType{tensor.BF16, tensor.F32} {
			for qk := 8; qk <= source.FlashMaxDim+8; qk += 8 {
				for v := 8; v <= source.FlashMaxDim+8; v += 8 {
					takes := flashTakes(t, arch, dtype, qk, v)
					for pass, needs := range passes {
						if s, ok := source.FlashShapeFor(dtype == tensor.F32, qk, v, shared, needs); ok != takes {
							t.Errorf("sm%d, %v, head dims %d and %d, %s: the rules take them: %t; a shape: %t, %+v", arch, dtype, qk, v,
								pass, takes, ok, s)
						}
					}
				}
			}
		}
	}
}

// notOfShapes lists rules on head dims that do not depend on shapes: one is fixed by padding, the other is about
// untested dims.
var notOfShapes = []string{"flash-head-dims-differ", "flash-head-dim-192-sm86"}

// flashTakes reports whether no rule rejects the head dims, except for notOfShapes.
func flashTakes(t *testing.T, arch int, dtype tensor.DType, qk, v int) bool {
	_, err := backends.Select(backends.Params{
		Want: backends.Flash,
		Arch: arch, Flash: backends.V(1, 0, 0), DType: dtype, Batch: 1, SeqQ: 4096, SeqKV: 4096,
		Heads: 4, KVHeads: 2, HeadDim: qk, HeadDimV: v, Causal: true, WindowLeft: -1, Training: true, ContextSize: 1,
		Algorithm: "ring", Layout: "zigzag",
	})
	var none *backends.NoBackendError
	if !errors.As(err, &none) {
		return err == nil
	}
	for _, r := range none.Rejected {
		if r.Backend == backends.Flash && !slices.Contains(notOfShapes, r.Rule) {
			return false
		}
	}
	return true
}

// TestFlashRows compares the rule on rows with the grids of the kernels.
func TestFlashRows(t *testing.T) {
	for dim := 32; dim <= source.FlashMaxDim; dim += 32 {
		shape, ok := source.FlashShapeFor(false, dim, dim, sharedPerBlock[90], source.FlashShape.BackwardShared)
		most := call.MaxFlashRows(shape)
		for _, n := range []int{most, most + 1} {
			_, err := backends.Select(backends.Params{
				Want: backends.Flash, Arch: 90, Flash: backends.V(1, 0, 0), DType: tensor.BF16, Batch: 1, SeqQ: n, SeqKV: n,
				Heads: 4, KVHeads: 2, HeadDim: dim, HeadDimV: dim, Causal: true, WindowLeft: -1, Training: true,
			})
			if !ok || (err == nil) != (n == most) {
				t.Errorf("head dim %d, %d rows of at most %d: %v", dim, n, most, err)
			}
		}
	}
}
