package device

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

var kinds = worldtest.ProcessKinds{
	"fake device": {Open: func(ctx context.Context, host *comm.Group, _ string) (worldtest.ProcessRank, error) {
		f := NewFakeDevice(host.Rank())
		g, err := FakeDeviceProcess(ctx, host, f)
		return worldtest.ProcessRank{Comm: g, New: func(d tensor.DType, n int) tensor.View { return f.New(d, n) }}, err
	}},
}

func TestMain(m *testing.M) {
	kinds.Main()
	goleak.VerifyTestMain(m)
}

// TestStop stops a process without ending it: only the deadline tells.
func TestStop(t *testing.T) {
	kinds.End(t, "fake device", "stop", 4, worldtest.Stop, "no progress for 1s, the deadline")
}
