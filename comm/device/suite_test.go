package device

import (
	"context"
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// kinds lists worlds of processes. The library of fake devices moves bytes over the transport of the hosts' group, and
// knows no deadline either.
var kinds = worldtest.ProcessKinds{
	"fake device": {Open: func(ctx context.Context, host *comm.Group, _ string) (worldtest.ProcessRank, error) {
		f := newFakeDevice(host.Rank())
		kit := f.kit(func(ctx context.Context, host *comm.Group, s gpuStream, _ <-chan struct{}) (collectives, error) {
			g, err := host.Subgroup(ctx, 0, host.Rank(), s)
			if err != nil {
				return nil, err
			}
			g.SetDeadline(-1)
			return &fakeCalls{g}, nil
		})
		g, err := newGroup(ctx, host, kit, Options{}, false)
		return worldtest.ProcessRank{Comm: g, New: func(d tensor.DType, n int) tensor.View { return f.New(d, n) }}, err
	}},
}

func TestMain(m *testing.M) {
	kinds.Main()
	goleak.VerifyTestMain(m)
}

// TestStop stops a process without ending it: only the deadline tells.
func TestStop(t *testing.T) {
	t.Parallel()
	kinds.End(t, "fake device", "stop", 4, worldtest.Stop, ", the deadline")
}

// TestGroup runs the suite on fake devices: over host groups of one process and over sockets, with the library alone and
// with engines, which carry exchanges and gathers. The short form leaves out two of the four.
func TestGroup(t *testing.T) {
	for name, hosts := range map[string]func(t *testing.T, n int, opts comm.Options) []*comm.Group{
		"local": func(_ *testing.T, n int, opts comm.Options) []*comm.Group { return comm.NewLocal(n, nil, opts) },
		"unix": func(t *testing.T, n int, opts comm.Options) []*comm.Group {
			return worldtest.JoinUnix(t, make([]tensor.Stream, n), opts)
		},
	} {
		for _, engines := range []bool{false, true} {
			if testing.Short() && engines != (name == "unix") {
				continue
			}
			t.Run(fmt.Sprintf("%s engines=%t", name, engines), func(t *testing.T) {
				t.Parallel()
				commtest.TestDevices(t, commtest.Setup{
					SizesUnchecked: !engines,
					Device:         func(_ *testing.T, rank int) commtest.Device { return newFakeDevice(rank) },
					Connect: func(t *testing.T, devices []commtest.Device, opts comm.Options) []comm.Communicator {
						return suiteRanks(t, hosts(t, len(devices), opts), devices, engines)
					},
				})
			})
		}
	}
}

func suiteRanks(t *testing.T, hosts []*comm.Group, devices []commtest.Device, engines bool) []comm.Communicator {
	lib, fakes, cs := &fakeLibrary{}, make([]*fakeDevice, len(devices)), make([]comm.Communicator, len(devices))
	for i, d := range devices {
		fakes[i] = d.(*fakeDevice)
	}
	if engines {
		lib.engine = lib.subEngine
	}
	groups, err := connectFakes(lib, hosts, fakes, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range groups {
		cs[i] = g
	}
	return cs
}
