//go:build cuda

package gpu

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/kernels/source"
	"github.com/cprun/cprun/tensor"
)

// newUnmeasuredFlash is a Flash that takes kernels for Hopper, too, that calls do not go to yet.
func (r *cudaRig) newUnmeasuredFlash(deterministic bool) *Flash {
	f := r.newFlash(deterministic)
	f.unmeasured = true
	return f
}

// unmeasured are the shapes whose backward pass calls do not go to yet.
func unmeasured() (list []source.HopperShape) {
	for _, s := range source.HopperShapes {
		if !s.BackwardMeasured() {
			list = append(list, s)
		}
	}
	return list
}

// TestFlashUnmeasured runs the suite, bands, tiles and folds, and repeats, of head dims whose kernels for Hopper calls do not go to yet.
// On other GPUs it is of those for all.
func TestFlashUnmeasured(t *testing.T) {
	r := newCUDARig(t)
	fast, ordered := r.newUnmeasuredFlash(false), r.newUnmeasuredFlash(true)
	list := [][2]int{{136, 72}, {192, 192}, {128, 256}, {200, 8}}
	for _, s := range unmeasured() {
		list = append(list, [2]int{s.QK, s.V})
	}
	r.testFlashShapes(t, list, fast, ordered)
	wide := attentiontest.Options{DTypes: []tensor.DType{tensor.BF16, tensor.F16}, MaxHeadDim: 256, NoScores: true}
	wide.Leaves = func(c attentiontest.Case) bool {
		s, ok := source.HopperShapeFor(c.Dim, c.DimV)
		return ok && s.BackwardMeasured()
	}
	for _, f := range []*Flash{fast, ordered} {
		t.Run(fmt.Sprintf("deterministic %t", f.deterministic), func(t *testing.T) {
			attentiontest.TestKernel(t, func(testing.TB) attentiontest.Rig { return r.attention(f) }, wide)
		})
	}
	for _, s := range unmeasured() {
		for _, dtype := range wide.DTypes {
			t.Run(fmt.Sprintf("%d and %d in %v repeat", s.QK, s.V, dtype), func(t *testing.T) {
				r.within(t).testFlashRepeats(dtype, [2]int{s.QK, s.V}, ordered, fast)
			})
		}
	}
	if fast.hopper != nil {
		t.Run("every one has run", r.testUnmeasuredRan)
	}
}

// testUnmeasuredRan holds that the kernels have run, not only others in their place.
func (r *cudaRig) testUnmeasuredRan(t *testing.T) {
	for _, s := range unmeasured() {
		for _, options := range [][2]bool{{false, false}, {true, false}, {false, true}, {true, true}} {
			capped, ordered := options[0], options[1]
			k := functionKey{s.Backward(capped, ordered).Name, "hopper_backward_bf16", s.BackwardShared(capped)}
			if r.loader.functions.known[k] == nil {
				t.Errorf("%+v has not", k)
			}
		}
	}
}
