//go:build cuda

package call

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

// TestNonFiniteOnHost runs the suite of NaN and infinities on the kernels of GPUs: as before Hopper, on Hopper, and the
// reference.
func TestNonFiniteOnHost(t *testing.T) {
	h := newHost(t)
	for _, deterministic := range []bool{false, true} {
		k := &hostFlash{h, deterministic, large}
		reference := &hostReference{hostFlash{h, false, large}}
		for _, x := range []struct {
			name   string
			kernel attention.Kernel
			dtype  tensor.DType
		}{{"flash", k, tensor.F32}, {"flash", k, tensor.F16}, {"hopper", hostHopper{hostFlash: k, sms: 4}, tensor.BF16}, {"reference", reference, tensor.F32}} {
			if x.name == "reference" && deterministic {
				continue // it is always
			}
			rig := k.rig()
			rig.Kernel = x.kernel
			t.Run(fmt.Sprintf("%s, deterministic %t", x.name, deterministic), func(t *testing.T) {
				h.t = t
				attentiontest.TestNonFinite(t, func(testing.TB) attentiontest.Rig { return rig }, attentiontest.Options{
					DTypes: []tensor.DType{x.dtype}, NoScores: x.name != "reference", Leaves: someOf(nil),
				})
			})
		}
	}
}
