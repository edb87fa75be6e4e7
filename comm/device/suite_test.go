package device

import (
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// TestGroup runs the suite on fake devices, over host groups of one process and over
// sockets.
func TestGroup(t *testing.T) {
	for name, hosts := range map[string]func(t *testing.T, n int, opts comm.Options) []*comm.Group{
		"local": func(_ *testing.T, n int, opts comm.Options) []*comm.Group { return comm.NewLocal(n, nil, opts) },
		"unix": func(t *testing.T, n int, opts comm.Options) []*comm.Group {
			return worldtest.JoinUnix(t, make([]tensor.Stream, n), opts)
		},
	} {
		t.Run(name, func(t *testing.T) {
			commtest.TestDevices(t, commtest.Setup{
				SizesUnchecked: true,
				Device:         func(_ *testing.T, rank int) commtest.Device { return NewFakeDevice(rank) },
				Connect: func(t *testing.T, devices []commtest.Device, opts comm.Options) []comm.Communicator {
					fakes := make([]*FakeDevice, len(devices))
					for i, d := range devices {
						fakes[i] = d.(*FakeDevice)
					}
					groups, err := FakeDeviceWorld(hosts(t, len(devices), opts), fakes, Options{})
					if err != nil {
						t.Fatal(err)
					}
					cs := make([]comm.Communicator, len(groups))
					for i, g := range groups {
						cs[i] = g
					}
					return cs
				},
			})
		})
	}
}
