package device

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// TestGroup runs the suite on fake devices: over host groups of one process and over sockets, with the library alone and
// with engines, which carry exchanges and gathers.
func TestGroup(t *testing.T) {
	for name, hosts := range map[string]func(t *testing.T, n int, opts comm.Options) []*comm.Group{
		"local": func(_ *testing.T, n int, opts comm.Options) []*comm.Group { return comm.NewLocal(n, nil, opts) },
		"unix": func(t *testing.T, n int, opts comm.Options) []*comm.Group {
			return worldtest.JoinUnix(t, make([]tensor.Stream, n), opts)
		},
	} {
		for _, engines := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s engines=%t", name, engines), func(t *testing.T) {
				commtest.TestDevices(t, commtest.Setup{
					SizesUnchecked: !engines,
					Device:         func(_ *testing.T, rank int) commtest.Device { return NewFakeDevice(rank) },
					Connect: func(t *testing.T, devices []commtest.Device, opts comm.Options) []comm.Communicator {
						return connectFakes(t, hosts(t, len(devices), opts), devices, engines)
					},
				})
			})
		}
	}
}

func connectFakes(t *testing.T, hosts []*comm.Group, devices []commtest.Device, engines bool) []comm.Communicator {
	lib, fakes := &fakeLibrary{worlds: map[uint64]*local.World{}}, make([]*FakeDevice, len(devices))
	for i, d := range devices {
		fakes[i] = d.(*FakeDevice)
	}
	if engines {
		lib.engine = func(ctx context.Context, host *comm.Group) (mover, error) {
			g, err := host.Subgroup(ctx, 0, host.Rank(), fakes[host.WorldRank(host.Rank())].s)
			return &fakeEngine{g, new(atomic.Int64)}, err
		}
	}
	groups, err := fakeDeviceWorld(lib, hosts, fakes, Options{})
	if err != nil {
		t.Fatal(err)
	}
	cs := make([]comm.Communicator, len(groups))
	for i, g := range groups {
		cs[i] = g
	}
	return cs
}
