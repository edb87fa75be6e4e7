package cpu

import (
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

func TestSinks(t *testing.T) {
	attentiontest.TestSinks(t, func(t testing.TB) (attentiontest.Rig, attention.Sinks) {
		c := newCPU(t)
		return attentiontest.Rig{Kernel: c, Sync: c.Stream().Sync}, c
	}, tensor.F32, tensor.F64, tensor.BF16, tensor.F16)
}
