package device

import (
	"errors"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// Calls on the device say whom they may wait for, in the order in which the library runs them, and go on
// to say so when the group has ended by a deadline.
func TestGroupWaits(t *testing.T) {
	const n, away = 3, 1
	devices := make([]*FakeDevice, n)
	for r := range devices {
		devices[r] = NewFakeDevice(r)
	}
	groups, err := FakeDeviceWorld(
		comm.NewLocal(n, nil, comm.Options{Deadline: 500 * time.Millisecond}),
		devices,
		Options{},
	)
	if err != nil {
		t.Fatal(err)
	}
	devices[0].Stream().Label("step 4/backward/layer 1")
	var calls []comm.Pending
	for range 2 {
		p, err := groups[0].AllReduce(devices[0].New(tensor.F32, 100), comm.Sum)
		if err != nil {
			t.Fatal(err)
		}
		calls = append(calls, p)
	}
	calls[0].Wait()
	check := func(when string, ws []comm.Wait) {
		t.Helper()
		if len(ws) != 2 || !ws[0].Begun || !ws[0].Needed || !ws[0].Vague || len(ws[0].Open) != n-1 ||
			ws[0].Open[0].Peer != 1 ||
			ws[0].Bytes != 400 ||
			ws[1].Begun ||
			len(ws[1].Open) > 0 {
			t.Fatalf("%s: %+v", when, ws)
		}
		for i, w := range ws {
			if w.Op != "all-reduce" || w.Label != "step 4/backward/layer 1" || w.Call != uint64(i+1) ||
				w.Via != TransportNCCL ||
				w.Group != groups[0].Host().ID() {
				t.Errorf("%s: %+v", when, w)
			}
		}
	}
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		if ws := groups[0].Waits(); len(ws) == 2 && !ws[1].Needed && ws[0].Begun && !ws[0].Since.IsZero() ||
			time.Since(start) > 10*time.Second {
			check("in flight", ws)
			break
		}
	}
	if ws := groups[away].Waits(); len(ws) > 0 {
		t.Errorf("rank %d, which stays away, waits %+v", away, ws)
	}
	for _, p := range calls {
		if err := p.Sync(testContext(t)); !errors.Is(err, comm.ErrDeadline) {
			t.Error(err)
		}
	}
	check("after the deadline", groups[0].Waits())
	for r, g := range groups {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		devices[r].Close()
	}
}
