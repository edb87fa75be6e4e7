//go:build cuda

package gpu

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/cuda/dnn"
	"github.com/cprun/cprun/tensor"
)

// block is the most queries or keys of a product of any of our kernels; see attentiontest.Options.
const block = 192

// TestNonFinite runs the suite of NaN and infinities on the kernels of this package: the reference, and flash as before
// Hopper, with little shared memory, and as on this GPU.
func TestNonFinite(t *testing.T) {
	r := newCUDARig(t)
	for _, x := range []struct {
		name string
		make func() attention.Kernel
		opts attentiontest.Options
	}{
		{"reference", func() attention.Kernel { return r.newDeviceReference() }, attentiontest.Options{}},
		{"flash before Hopper", func() attention.Kernel { return r.newOlderFlash(false) }, attentiontest.Options{NoScores: true, Block: block}},
		{"flash before Hopper, deterministic", func() attention.Kernel { return r.newOlderFlash(true) },
			attentiontest.Options{NoScores: true, Block: block}},
		{"small flash", func() attention.Kernel { return r.newSmallFlash(false) }, attentiontest.Options{NoScores: true, Block: block}},
		{"flash", func() attention.Kernel { return r.newFlash(false) }, attentiontest.Options{NoScores: true, Block: block}},
		{"flash, deterministic", func() attention.Kernel { return r.newFlash(true) }, attentiontest.Options{NoScores: true, Block: block}},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := r.within(t)
			x.opts.DTypes = []tensor.DType{tensor.F32, tensor.BF16, tensor.F16}
			attentiontest.TestNonFinite(t, func(testing.TB) attentiontest.Rig { return r.attention(x.make()) }, x.opts)
		})
	}
}

// TestFusedNonFinite measures which NaN and infinities cuDNN drops, in one call and in three hops behind our fold, and
// holds the record of package backends to it. -v prints the table.
func TestFusedNonFinite(t *testing.T) {
	version, err := dnn.Version()
	check(t, err)
	var found []string
	for name, options := range map[string]FusedOptions{"plain": {}, "deterministic": {Deterministic: true}, "packed": {Packed: true}} {
		for _, dtype := range []tensor.DType{tensor.BF16, tensor.F16} {
			for _, dim := range []int{64, 128} {
				for _, calls := range []int{1, 3} {
					t.Run(fmt.Sprintf("%s, %v, head dim %d, %d calls", name, dtype, dim, calls), func(t *testing.T) {
						r := newFused(t, options)
						rows := attentiontest.NonFiniteReach(t, r.rig(), attentiontest.NonFiniteCase(dim, calls), dtype)
						t.Logf("cuDNN %s on sm%d drops %q", backends.Version(version), r.dev.Arch, rows)
						found = append(found, rows...)
					})
				}
			}
		}
	}
	slices.Sort(found)
	found = slices.Compact(found)
	recorded, ok := backends.Dropped(backends.Version(version))
	if !ok || !slices.Equal(found, recorded) {
		t.Errorf("cuDNN %s drops %q; the record, which has it %t, is %q", backends.Version(version), found, ok, recorded)
	}
}
