package device

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// A rank that gives up passes its cause on before its callers learn of it, by an error or by
// the compute stream: if they exit at once, the others would blame this rank.
func TestGroupTellsFirst(t *testing.T) {
	ctx := testContext(t)
	hosts, told := worldtest.SlowHosts(comm.Options{Deadline: 20 * time.Millisecond})
	devices := []*FakeDevice{NewFakeDevice(0), NewFakeDevice(1)}
	lib := &fakeLibrary{worlds: map[uint64]*local.World{}}
	groups, err := fakeDeviceWorld(lib, hosts, devices, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var early atomic.Bool
	devices[0].s.OnFail(func(error) { early.Store(!told()) })
	p, err := groups[0].Exchange(nil, []comm.Message{{Peer: 1, View: devices[0].New(tensor.F32, 3)}})
	if err != nil {
		t.Fatal(err)
	}
	err = p.Sync(ctx)
	if told := told(); !told || !errors.Is(err, comm.ErrDeadline) {
		t.Errorf("the call ended with %v, the other rank told: %v", err, told)
	}
	if err := devices[0].s.Sync(ctx); !errors.Is(err, comm.ErrDeadline) || early.Load() {
		t.Errorf("the compute stream ended with %v, before the other rank was told: %v", err, early.Load())
	}
	for r, g := range groups {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		devices[r].Close()
	}
}
