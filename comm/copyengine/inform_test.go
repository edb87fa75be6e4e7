package copyengine

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
)

// A rank that gives up passes its cause on before its callers learn of it, by an error or by the
// compute stream: if they exit at once, the others would blame this rank.
func TestTellsFirst(t *testing.T) {
	ctx := testContext(t)
	hosts, told := worldtest.SlowHosts(comm.Options{})
	board := newHeapBoard(2)
	rigs := []fakeRig{{&fakeDevice{rank: 0}, newFakeStream(nil, 0)}, {&fakeDevice{rank: 1}, newFakeStream(nil, 0)}}
	worlds, errs := connectAll(func(r int) config {
		return config{
			host: hosts[r], dev: rigs[r].dev, compute: rigs[r].compute, using: new(sync.Mutex),
			limit: 20 * time.Millisecond, share: board,
		}
	}, 2)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	var early atomic.Bool
	rigs[0].compute.onFail(func(error) { early.Store(!told()) })
	v, err := rigs[0].bytes(100)
	if err != nil {
		t.Fatal(err)
	}
	p, err := worlds[0].Exchange(nil, []comm.Message{{Peer: 1, View: v}})
	if err != nil {
		t.Fatal(err)
	}
	err = p.Sync(ctx)
	if told := told(); !told || !errors.Is(err, comm.ErrDeadline) {
		t.Errorf("the call ended with %v, the other rank told: %v", err, told)
	}
	p.Wait()
	if err := rigs[0].compute.Sync(ctx); !errors.Is(err, comm.ErrDeadline) || early.Load() {
		t.Errorf("the compute stream ended with %v, before the other rank was told: %v", err, early.Load())
	}
	for r, w := range worlds {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		rigs[r].compute.close()
	}
}
