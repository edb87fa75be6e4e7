//go:build cuda

package gpu

import (
	"testing"

	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

// newDeviceReference returns a Reference on the rig's device.
func (r *cudaRig) newDeviceReference() *Reference {
	r.t.Helper()
	k, err := NewReference(r.stream, r.loader)
	check(r.t, err)
	return k
}

func TestDeviceReference(t *testing.T) {
	attentiontest.TestKernel(t, func(t testing.TB) attentiontest.Rig {
		r := newCUDARig(t)
		return r.attention(r.newDeviceReference())
	}, attentiontest.Options{DTypes: []tensor.DType{tensor.F32, tensor.BF16, tensor.F16}, MaxHeadDim: 512})
}

func TestDeviceReferenceFixtures(t *testing.T) {
	attentiontest.TestFixtures(t, func(t testing.TB) attentiontest.Rig {
		r := newCUDARig(t)
		return r.attention(r.newDeviceReference())
	})
}
