package copyengine

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
)

// pair returns two worlds on fake devices, and a function by which a rank swaps 100 bytes with the other.
func pair(t *testing.T, limit time.Duration) (rigs []fakeRig, worlds []*world, swap func(r int) comm.Pending) {
	t.Helper()
	hosts := comm.NewLocal(2, nil, comm.Options{})
	board := newHeapBoard(2)
	rigs = []fakeRig{{&fakeDevice{rank: 0}, newFakeStream(nil, 0)}, {&fakeDevice{rank: 1}, newFakeStream(nil, 0)}}
	worlds, errs := connectAll(func(r int) config {
		return config{
			host: hosts[r], dev: rigs[r].dev, compute: rigs[r].compute, using: new(sync.Mutex),
			limit: limit, share: board,
		}
	}, 2)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return rigs, worlds, func(r int) comm.Pending {
		v, err := rigs[r].bytes(100)
		w, err2 := rigs[r].bytes(100)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		p, err := worlds[r].Exchange([]comm.Message{{Peer: 1 - r, View: v}}, []comm.Message{{Peer: 1 - r, View: w}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
}

// What was waited for is still told when a message has stood still for too long, and all waits have ended.
func TestWaitsAreKept(t *testing.T) {
	rigs, worlds, swap := pair(t, 100*time.Millisecond)
	if err := swap(0).Sync(testContext(t)); !errors.Is(err, comm.ErrDeadline) {
		t.Error(err)
	}
	for r, w := range worlds {
		w.Close()
		rigs[r].compute.close()
	}
	if ws := worlds[0].e.Waits(); len(ws) != 1 || len(ws[0].Open) != 2 || ws[0].Open[0].Peer != 1 {
		t.Errorf("%+v", ws)
	}
	if ws := worlds[1].e.Waits(); len(ws) > 0 {
		t.Errorf("the rank that stayed away waited %+v", ws)
	}
}

// The waits of an engine name the peer that has not posted its end. If a goroutine holds the engine's lock in the
// driver, they report that instead.
func TestWaits(t *testing.T) {
	ctx := testContext(t)
	rigs, worlds, swap := pair(t, time.Minute)
	first := swap(0)
	var ws []comm.Wait
	for start := time.Now(); time.Since(start) < 10*time.Second; time.Sleep(time.Millisecond) {
		if ws = worlds[0].e.Waits(); len(ws) == 1 && len(ws[0].Open) == 2 {
			break
		}
	}
	if len(ws) != 1 || !ws[0].Begun || ws[0].Op != "exchange" || ws[0].Via != via || ws[0].Call != 1 ||
		ws[0].Bytes != 200 ||
		len(ws[0].Open) != 2 {
		t.Fatalf("%+v", ws)
	}
	if o := ws[0].Open[0]; o.Peer != 1 || o.Bytes != 100 || ws[0].Open[1].Send == o.Send {
		t.Errorf("%+v", ws[0].Open)
	}
	if ws := worlds[1].e.Waits(); len(ws) > 0 {
		t.Errorf("the rank that stays away waits %+v", ws)
	}
	worlds[0].e.mu.Lock()
	stuck := worlds[0].e.Waits()
	worlds[0].e.mu.Unlock()
	if len(stuck) != 1 || !stuck[0].Begun || len(stuck[0].Open) > 0 || stuck[0].Since.IsZero() {
		t.Errorf("with the lock held: %+v", stuck)
	}
	second := swap(1)
	for r, p := range []comm.Pending{first, second} {
		if err := p.Sync(ctx); err != nil {
			t.Error(err)
		}
		if ws := worlds[r].e.Waits(); len(ws) > 0 {
			t.Errorf("rank %d waits %+v when all is over", r, ws)
		}
	}
	for r, w := range worlds {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		rigs[r].compute.close()
	}
}
