//go:build cuda

package call

import (
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

// TestNonFiniteOnHost runs the suite of NaN and infinities on the kernels before Hopper, on those for Hopper, and on
// the reference. In 16 bits, emulating the products of a warp takes long, so it runs a small case, and for the
// reference a tiny one.
func TestNonFiniteOnHost(t *testing.T) {
	h := newHost(t)
	fast, ordered := &hostFlash{h, false, large}, &hostFlash{h, true, large}
	upTo := func(pairs int) func(attentiontest.Case) bool {
		return func(c attentiontest.Case) bool { return c.SeqQ*c.SeqK > pairs }
	}
	tiny, small, most := upTo(35), upTo(70*70), someOf(upTo(150*150))
	sample := 1
	if testing.Short() {
		sample = 2
	}
	for _, x := range []struct {
		name   string
		kernel attention.Kernel
		dtype  tensor.DType
		leaves func(attentiontest.Case) bool
		block  int
	}{
		{"flash", fast, tensor.F32, most, 128},
		{"flash, deterministic", ordered, tensor.F32, most, 128},
		{"flash", fast, tensor.F16, small, 128},
		{"Hopper", hostHopper{hostFlash: fast, sms: 4}, tensor.BF16, small, 192},
		{"Hopper, launches of 24 keys", hostHopper{hostFlash: fast, sms: 4, keys: 24}, tensor.BF16, small, 192},
		{"Hopper, deterministic", hostHopper{hostFlash: ordered, sms: 4}, tensor.F16, small, 192},
		{"reference", &hostReference{*fast}, tensor.F32, tiny, 0},
	} {
		rig := fast.rig()
		rig.Kernel = x.kernel
		t.Run(x.name, func(t *testing.T) {
			h.t = t
			attentiontest.TestNonFinite(t, func(testing.TB) attentiontest.Rig { return rig }, attentiontest.Options{
				DTypes: []tensor.DType{x.dtype}, NoScores: x.name != "reference", Leaves: x.leaves, Block: x.block,
				Sample: sample,
			})
		})
	}
}
