package comm

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/tensor"
)

// slowTeller is a transport that takes a while to tell the other ranks of a failure.
type slowTeller struct {
	transport
	told atomic.Bool
}

func (s *slowTeller) flush() {
	if s.err() != nil {
		time.Sleep(50 * time.Millisecond)
		s.told.Store(true)
	}
}

// slowHosts are two host groups, the first of which is slow to tell.
func slowHosts(opts Options) ([]*Group, *slowTeller) {
	hosts := NewLocal(2, nil, opts)
	slow := &slowTeller{transport: hosts[0].t}
	hosts[0].t = slow
	return hosts, slow
}

// A rank that gives up passes its cause on before its callers learn of it, by an error or by
// the compute stream: if they exit at once, the others would blame this rank.
func TestDeviceGroupTellsFirst(t *testing.T) {
	ctx := testContext(t)
	hosts, slow := slowHosts(Options{Deadline: 20 * time.Millisecond})
	devices := []*FakeDevice{NewFakeDevice(0), NewFakeDevice(1)}
	lib := &fakeLibrary{worlds: map[uint64]*localWorld{}}
	groups, err := fakeDeviceWorld(lib, hosts, devices, DeviceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var early atomic.Bool
	devices[0].s.OnFail(func(error) { early.Store(!slow.told.Load()) })
	p, err := groups[0].Exchange(nil, []Message{{1, devices[0].New(tensor.F32, 3)}})
	if err != nil {
		t.Fatal(err)
	}
	err = p.Sync(ctx)
	if told := slow.told.Load(); !told || !errors.Is(err, ErrDeadline) {
		t.Errorf("the call ended with %v, the other rank told: %v", err, told)
	}
	if err := devices[0].s.Sync(ctx); !errors.Is(err, ErrDeadline) || early.Load() {
		t.Errorf("the compute stream ended with %v, before the other rank was told: %v", err, early.Load())
	}
	for r, g := range groups {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		devices[r].Close()
	}
}

// The same of the copy engines.
func TestCopyEngineTellsFirst(t *testing.T) {
	ctx := copyContext(t)
	hosts, slow := slowHosts(Options{})
	board := newHeapBoard(2)
	rigs := []fakeRig{{&fakeDevice{rank: 0}, newFakeStream(nil, 0)}, {&fakeDevice{rank: 1}, newFakeStream(nil, 0)}}
	worlds, errs := connectAllCopies(func(r int) copyConfig {
		return copyConfig{
			host: hosts[r], dev: rigs[r].dev, compute: rigs[r].compute, using: new(sync.Mutex),
			limit: 20 * time.Millisecond, lanes: 1, split: splitBytes, share: board,
		}
	}, 2)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	var early atomic.Bool
	rigs[0].compute.onFail(func(error) { early.Store(!slow.told.Load()) })
	v, err := rigs[0].bytes(100)
	if err != nil {
		t.Fatal(err)
	}
	p, err := worlds[0].Exchange(nil, []Message{{1, v}})
	if err != nil {
		t.Fatal(err)
	}
	err = p.Sync(ctx)
	if told := slow.told.Load(); !told || !errors.Is(err, ErrDeadline) {
		t.Errorf("the call ended with %v, the other rank told: %v", err, told)
	}
	p.Wait()
	if err := rigs[0].compute.Sync(ctx); !errors.Is(err, ErrDeadline) || early.Load() {
		t.Errorf("the compute stream ended with %v, before the other rank was told: %v", err, early.Load())
	}
	for r, w := range worlds {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		rigs[r].compute.close()
	}
}
