package deltatest

import (
	"testing"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/tensor"
)

func TestSuiteAcceptsTheReference(t *testing.T) {
	sync := func() error { return nil }
	Test(t, func(testing.TB) Rig { return HostRig(delta.Reference{}, sync) }, tensor.F64, tensor.F32, tensor.BF16)
}
