//go:build cuda

package gpu

import (
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

func TestSinks(t *testing.T) {
	attentiontest.TestSinks(t, func(t testing.TB) (attentiontest.Rig, attention.Sinks) {
		r := newCUDARig(t)
		return r.attention(r.newDeviceReference()), r.Ops
	}, tensor.F32, tensor.BF16, tensor.F16)
}
