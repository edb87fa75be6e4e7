package copyengine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
)

// patience ends a test that hangs.
const patience = 60 * time.Second

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

var errBoom = errors.New("the loss is not a number")

func TestCopyEngineCases(t *testing.T) {
	ranks, part := []int{1, 2, 3, 4}, 1
	if testing.Short() {
		ranks, part = ranks[:3], 5
	}
	for _, n := range ranks {
		for _, queues := range []struct {
			name string
			one  bool
			room int
		}{{"own queues", false, 0}, {"one queue", true, 0}, {"own short queues", false, 2}, {"one short queue", true, 2}} {
			t.Run(fmt.Sprintf("ranks=%d, %s", n, queues.name), func(t *testing.T) {
				t.Parallel()
				ctx := testContext(t)
				var q *fakeQueue
				// With one queue for all streams of all ranks, the device does work in the order of submission: nothing
				// may wait for later work.
				if queues.one {
					q = newFakeQueue(queues.room)
				}
				hosts := comm.NewLocal(n, nil, comm.Options{})
				eachRank(t, fakeRanks(t, hosts, q, queues.room), func(r *Rank) error {
					return r.Cases(ctx, amounts{
						ring: 1500 / n / part, ringBytes: 3000, pairs: 300 / n / part, pairBytes: 5000,
						ahead: 100 / part, handOn: 100 / part, handBytes: 2000, groupings: 40 / part,
					})
				})
			})
		}
	}
}

// One rank aborts while another one's host waits in Wait for a peer that never calls, and
// while a device waits for a flag that never comes.
func TestCopyEngineAbort(t *testing.T) {
	ctx := testContext(t)
	eachRank(t, localRanks(t, 3, 0), func(r *Rank) error {
		v, err := r.rig.bytes(100)
		if err != nil {
			return err
		}
		gate := make(chan struct{})
		if r.Rank() == 1 { // has posted; its device does not wait, and rank 2's device waits for it
			r.rig.(fakeRig).compute.do(func() { <-gate })
		}
		// Rank 0 waits on its host for the call of rank 2.
		p, err := r.one(r.Rank() == 2, with([]int{2, 2, 1}[r.Rank()], v))
		if err != nil {
			return err
		}
		if r.Rank() != 1 {
			p.Wait()
		}
		if r.Rank() == 2 {
			time.Sleep(5 * time.Millisecond)
			r.Abort(errBoom)
		}
		err = p.Sync(ctx)
		close(gate)
		if !strings.Contains(fmt.Sprint(err), errBoom.Error()) || comm.IsRemote(err) != (r.Rank() != 2) {
			return fmt.Errorf("the call ended with %w", err)
		}
		if err := r.rig.stream().Sync(ctx); !strings.Contains(fmt.Sprint(err), errBoom.Error()) {
			return fmt.Errorf("the compute stream ended with %w", err)
		}
		if _, err := r.Exchange(nil, nil); err == nil {
			return errors.New("a call after the abort was taken")
		}
		return nil
	})
}

// TestCopyEngineBehindFullQueues blocks a rank's host in the driver: its queues are full with work after a wait for an
// absent peer. The deadline ends that, and so does a failure of the group.
func TestCopyEngineBehindFullQueues(t *testing.T) {
	for _, c := range []struct {
		name  string
		limit time.Duration
		want  error
		say   string
	}{{"deadline", 100 * time.Millisecond, comm.ErrDeadline, "rank 1"}, {"abort", -1, nil, errBoom.Error()}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			gate := make(chan struct{})
			hosts := comm.NewLocal(2, nil, comm.Options{Deadline: c.limit})
			eachRank(t, fakeRanks(t, hosts, nil, 8), func(r *Rank) error {
				v, err := r.rig.bytes(100)
				if err != nil {
					return err
				}
				if r.Rank() == 1 { // its host has come to the call, its device has not
					defer close(gate)
					r.rig.(fakeRig).compute.do(func() { <-gate })
					p, err := r.Exchange(nil, with(0, v))
					if err == nil && c.limit < 0 {
						time.Sleep(20 * time.Millisecond)
						r.Abort(errBoom)
					}
					if err = comm.Finish(ctx)(p, err); comm.IsRemote(err) == (c.limit < 0) {
						return fmt.Errorf("the call ended with %w", err)
					}
					return nil
				}
				p, err := r.Exchange(with(1, v), nil)
				if err != nil {
					return err
				}
				p.Wait()
				for err == nil && ctx.Err() == nil {
					_, err = r.Exchange(with(1, v), nil)
				}
				if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.say) {
					return fmt.Errorf("the calls ended with %w", err)
				}
				return nil
			})
		})
	}
}

// TestCopyEngineSetup lets one rank's device fail: all ranks fail, and no file remains.
func TestCopyEngineSetup(t *testing.T) {
	for _, call := range []string{"attach", "lane", "probe", "reach"} {
		t.Run(call, func(t *testing.T) {
			broken := errors.New("no " + call + " here")
			before, err := os.ReadDir(shmDir)
			if err != nil {
				t.Fatal(err)
			}
			hosts, compute := comm.NewLocal(3, nil, comm.Options{}), newFakeStream(nil, 0)
			defer compute.close()
			worlds, errs := connectAll(func(r int) config {
				dev := &fakeDevice{rank: r}
				if r == 1 {
					dev.faults = map[string]error{call: broken}
				}
				return configOf(hosts[r], dev, compute, sharedFile{})
			}, 3)
			for r, err := range errs {
				if err == nil || errors.Is(err, broken) != (r == 1) ||
					r != 1 && !strings.Contains(err.Error(), "rank 1") {
					t.Errorf("rank %d: %v", r, err)
				}
				if worlds[r] != nil {
					t.Errorf("rank %d has a world", r)
				}
				hosts[r].Close()
			}
			after, err := os.ReadDir(shmDir)
			if err != nil || len(after) > len(before) {
				t.Errorf("%d files in %s, %d before: %v", len(after), shmDir, len(before), err)
			}
		})
	}
}

// TestNoGates checks that a call has no gates if a copy may need the processors that wait for it, and that Gates
// returns after the group has failed. TestCopyEngineCases uses gates.
func TestNoGates(t *testing.T) {
	ctx := testContext(t)
	eachRank(t, localRanks(t, 2, 0), func(r *Rank) error {
		v, err := r.rig.bytes(100)
		if err != nil {
			return err
		}
		peer := 1 - r.Rank()
		r.e.near[peer] = true
		p, err := r.Exchange(with(peer, v.Slice(3, 0, 50)), with(peer, v.Slice(3, 50, 100)))
		if err != nil {
			return err
		}
		if gates := p.(comm.Gated).Gates(); gates != nil {
			return fmt.Errorf("a device that both ranks have: %v", gates)
		}
		p.Wait()
		if err := p.Sync(ctx); err != nil {
			return err
		}
		r.e.near[peer] = false
		if r.Rank() == 1 {
			time.Sleep(5 * time.Millisecond)
			r.Abort(errBoom)
			return nil
		}
		if p, err = r.Exchange(nil, with(1, v)); err != nil {
			return nil // the other one was quick
		}
		if gates := p.(comm.Gated).Gates(); gates != nil {
			return fmt.Errorf("a group that has failed: %v", gates)
		}
		if err := p.Sync(ctx); !errors.Is(err, comm.ErrAborted) {
			return fmt.Errorf("the call ended with %w", err)
		}
		return nil
	})
}

// A rank that gives up passes its cause on before its callers learn of it, by an error or by the
// compute stream: if they exit at once, the others would blame this rank.
func TestTellsFirst(t *testing.T) {
	ctx := testContext(t)
	hosts, told := worldtest.SlowHosts(comm.Options{Deadline: 20 * time.Millisecond})
	r := fakeRanks(t, hosts, nil, 0)[0]
	compute := r.rig.(fakeRig).compute
	var early atomic.Bool
	compute.onFail(func(error) { early.Store(!told()) })
	p := r.swap(t)
	err := p.Sync(ctx)
	if told := told(); !told || !errors.Is(err, comm.ErrDeadline) {
		t.Errorf("the call ended with %v, the other rank told: %v", err, told)
	}
	p.Wait()
	if err := compute.Sync(ctx); !errors.Is(err, comm.ErrDeadline) || early.Load() {
		t.Errorf("the compute stream ended with %v, before the other rank was told: %v", err, early.Load())
	}
}

// swap begins an exchange of 100 bytes with the other rank of two.
func (r *Rank) swap(t *testing.T) comm.Pending {
	t.Helper()
	v, err := r.rig.bytes(200)
	if err != nil {
		t.Fatal(err)
	}
	peer := 1 - r.Rank()
	p, err := r.Exchange(with(peer, v.Slice(3, 0, 100)), with(peer, v.Slice(3, 100, 200)))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// What was waited for is still told when a message has stood still for too long, and all waits have ended.
func TestWaitsAreKept(t *testing.T) {
	t.Parallel()
	ranks := localRanks(t, 2, 100*time.Millisecond)
	if err := ranks[0].swap(t).Sync(testContext(t)); !errors.Is(err, comm.ErrDeadline) {
		t.Error(err)
	}
	for _, r := range ranks {
		r.Close()
	}
	if ws := ranks[0].e.Waits(); len(ws) != 1 || len(ws[0].Open) != 2 || ws[0].Open[0].Peer != 1 {
		t.Errorf("%+v", ws)
	}
	if ws := ranks[1].e.Waits(); len(ws) > 0 {
		t.Errorf("the rank that stayed away waited %+v", ws)
	}
}

// The waits of an engine name the peer that has not posted its end. If a goroutine holds the engine's lock in the
// driver, they report that instead.
func TestWaits(t *testing.T) {
	ranks := localRanks(t, 2, time.Minute)
	first := ranks[0].swap(t)
	var ws []comm.Wait
	for start := time.Now(); time.Since(start) < 10*time.Second; time.Sleep(time.Millisecond) {
		if ws = ranks[0].e.Waits(); len(ws) == 1 && len(ws[0].Open) == 2 {
			break
		}
	}
	if len(ws) != 1 || !ws[0].Begun || ws[0].Op != "exchange" || ws[0].Via != via || ws[0].Call != 1 ||
		ws[0].Bytes != 200 || len(ws[0].Open) != 2 {
		t.Fatalf("%+v", ws)
	}
	if o := ws[0].Open[0]; o.Peer != 1 || o.Bytes != 100 || ws[0].Open[1].Send == o.Send {
		t.Errorf("%+v", ws[0].Open)
	}
	if ws := ranks[1].e.Waits(); len(ws) > 0 {
		t.Errorf("the rank that stays away waits %+v", ws)
	}
	ranks[0].e.mu.Lock()
	stuck := ranks[0].e.Waits()
	ranks[0].e.mu.Unlock()
	if len(stuck) != 1 || !stuck[0].Begun || len(stuck[0].Open) > 0 || stuck[0].Since.IsZero() {
		t.Errorf("with the lock held: %+v", stuck)
	}
	for r, p := range []comm.Pending{first, ranks[1].swap(t)} {
		if err := p.Sync(testContext(t)); err != nil {
			t.Error(err)
		}
		if ws := ranks[r].e.Waits(); len(ws) > 0 {
			t.Errorf("rank %d waits %+v when all is over", r, ws)
		}
	}
}

func TestCopyBoard(t *testing.T) {
	const ranks = 3
	b := newHeapBoard(ranks).b
	seen := map[*uint64]string{}
	mark := func(p *uint64, name string) {
		if other, ok := seen[p]; ok {
			t.Errorf("%s and %s are one word", name, other)
		}
		seen[p] = name
	}
	for r := range ranks {
		mark(b.left(r), fmt.Sprintf("left %d", r))
		for p := range ranks {
			for kind := flagBegun; kind <= flagArrived; kind++ {
				mark(b.flag(r, p, kind), fmt.Sprintf("flag %d of %d, %d", kind, r, p))
			}
			mark(b.posted(r, p), fmt.Sprintf("posted %d, %d", r, p))
			mark(b.queued(r, p), fmt.Sprintf("queued %d, %d", r, p))
			for n := uint64(1); n <= postRing; n++ {
				mark(&b.post(r, p, n).bytes, fmt.Sprintf("post %d of %d, %d", n, r, p))
			}
		}
	}
	for n := uint64(1); n <= postRing; n++ {
		if !b.put(1, 2, n, &notice{bytes: n}) {
			t.Fatalf("no room for message %d", n)
		}
	}
	if b.put(1, 2, postRing+1, &notice{}) {
		t.Fatal("the ring takes more than it has room for")
	}
	*b.queued(1, 2) = 2
	for n := uint64(postRing + 1); n <= postRing+2; n++ {
		if !b.put(1, 2, n, &notice{bytes: n}) || b.post(1, 2, n-postRing).bytes != n || *b.posted(1, 2) != n {
			t.Fatalf("message %d is not in its place", n)
		}
	}
}
