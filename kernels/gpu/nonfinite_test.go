//go:build cuda

package gpu

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/tensor"
)

// block is the largest number of queries or keys in a product of cprun's kernels; see attentiontest.Options.
const block = 192

// TestNonFinite runs the suite of NaN and infinities on the reference, and on flash with the kernels before Hopper,
// with little shared memory, and with this GPU's kernels.
func TestNonFinite(t *testing.T) {
	r := newCUDARig(t)
	k := r.flashVariants(t, [2]int{16, 16}, [2]int{64, 64}, [2]int{128, 128})
	for _, x := range []struct {
		name     string
		kernel   attention.Kernel
		noScores bool
		block    int
	}{
		{"reference", r.newDeviceReference(), false, 0},
		{"flash", k.fast, true, block}, {"flash, deterministic", k.ordered, true, block},
		{"flash before Hopper", k.older, true, block}, {"flash before Hopper, deterministic", k.olderOrdered, true, block},
		{"small flash", k.small, true, block},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := r.within(t)
			rig := func(testing.TB) attentiontest.Rig { return r.attention(x.kernel) }
			attentiontest.TestNonFinite(t, rig, attentiontest.Options{
				DTypes: []tensor.DType{tensor.BF16, tensor.F16, tensor.F32}, NoScores: x.noScores, Block: x.block,
			})
		})
	}
}

// TestFusedNonFinite measures which NaN and infinities cuDNN drops, in one call and in three hops with folds, and
// compares with the record of package backends. -v prints the table.
func TestFusedNonFinite(t *testing.T) {
	version, err := dnn.Version()
	check(t, err)
	var found []string
	for _, x := range []struct {
		options FusedOptions
		dtype   tensor.DType
		dim     int
	}{
		{FusedOptions{}, tensor.BF16, 128}, {FusedOptions{}, tensor.BF16, 64}, {FusedOptions{}, tensor.F16, 128},
		{FusedOptions{Deterministic: true}, tensor.BF16, 128}, {FusedOptions{Packed: true}, tensor.BF16, 128},
	} {
		for _, calls := range []int{1, 3} {
			t.Run(fmt.Sprintf("%+v, %v, head dim %d, %d calls", x.options, x.dtype, x.dim, calls), func(t *testing.T) {
				r := newFused(t, x.options)
				rows := attentiontest.NonFiniteReach(t, r.rig(), attentiontest.NonFiniteCase(x.dim, calls), x.dtype)
				t.Logf("cuDNN %s on sm%d drops %q", backends.Version(version), r.dev.Arch, rows)
				found = append(found, rows...)
			})
		}
	}
	slices.Sort(found)
	found = slices.Compact(found)
	recorded, ok := backends.Dropped[backends.Version(version)]
	if !ok || !slices.Equal(found, recorded) {
		t.Errorf("cuDNN %s drops %q; the record, which has it %t, is %q", backends.Version(version), found, ok, recorded)
	}
}
