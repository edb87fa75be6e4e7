package copyengine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
)

// patience ends a test that hangs.
const patience = 60 * time.Second

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestCopyEngineCases(t *testing.T) {
	ranks := []int{1, 2, 3, 4}
	if testing.Short() {
		ranks = ranks[:3]
	}
	for _, n := range ranks {
		for _, queues := range []struct {
			name string
			one  bool
			room int
		}{{"own queues", false, 0}, {"one queue", true, 0}, {"own short queues", false, 2}, {"one short queue", true, 2}} {
			t.Run(fmt.Sprintf("ranks=%d, %s", n, queues.name), func(t *testing.T) {
				ctx := testContext(t)
				var q *fakeQueue
				// With one queue for all streams of all ranks, the device does work in the order of submission: nothing
				// may wait for later work.
				if queues.one {
					q = newFakeQueue(queues.room)
				}
				eachRank(t, fakeRanks(t, n, q, queues.room, comm.Options{}), func(r *Rank) error {
					if err := r.Ring(ctx, 1500/n, 3000); err != nil {
						return fmt.Errorf("ring: %w", err)
					}
					if err := r.AllPairs(ctx, 300/n, 5000); err != nil {
						return fmt.Errorf("all pairs: %w", err)
					}
					if n == 1 {
						return nil
					}
					if err := errors.Join(r.Ahead(ctx, 100, 2), r.Ahead(ctx, 5, 3*postRing+1)); err != nil {
						return fmt.Errorf("ahead: %w", err)
					}
					if err := r.HandOn(ctx, 100, 2000); err != nil {
						return fmt.Errorf("hand on: %w", err)
					}
					if err := r.Groupings(ctx, 40); err != nil {
						return fmt.Errorf("groupings: %w", err)
					}
					return nil
				})
			})
		}
	}
}

// One rank aborts while another one's host waits in Wait for a peer that never calls, and
// while a device waits for a flag that never comes.
func TestCopyEngineAbort(t *testing.T) {
	ctx := testContext(t)
	boom := errors.New("the loss is not a number")
	ranks := fakeRanks(t, 3, nil, 0, comm.Options{})
	eachRank(t, ranks, func(r *Rank) error {
		v, err := r.rig.bytes(100)
		if err != nil {
			return err
		}
		var p comm.Pending
		gate := make(chan struct{})
		switch r.Rank() {
		case 0: // waits on its host for the call of rank 2
			if p, err = r.Exchange(nil, []comm.Message{{Peer: 2, View: v}}); err != nil {
				return err
			}
			p.Wait()
		case 1: // has posted; its device does not wait, and rank 2's device waits for it
			r.rig.(fakeRig).compute.do(func() { <-gate })
			if p, err = r.Exchange(nil, []comm.Message{{Peer: 2, View: v}}); err != nil {
				return err
			}
		case 2:
			if p, err = r.Exchange([]comm.Message{{Peer: 1, View: v}}, nil); err != nil {
				return err
			}
			p.Wait()
			time.Sleep(5 * time.Millisecond)
			r.Abort(boom)
		}
		err = p.Sync(ctx)
		close(gate)
		if !strings.Contains(fmt.Sprint(err), boom.Error()) || comm.IsRemote(err) != (r.Rank() != 2) {
			return fmt.Errorf("the call ended with %w", err)
		}
		if err := r.rig.stream().Sync(ctx); !strings.Contains(fmt.Sprint(err), boom.Error()) {
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
	boom := errors.New("the loss is not a number")
	for _, c := range []struct {
		name  string
		limit time.Duration
		want  error
		say   string
	}{{"deadline", 100 * time.Millisecond, comm.ErrDeadline, "rank 1"}, {"abort", -1, nil, boom.Error()}} {
		t.Run(c.name, func(t *testing.T) {
			ctx := testContext(t)
			gate := make(chan struct{})
			eachRank(t, fakeRanks(t, 2, nil, 8, comm.Options{Deadline: c.limit}), func(r *Rank) error {
				v, err := r.rig.bytes(100)
				if err != nil {
					return err
				}
				if r.Rank() == 1 { // its host has come to the call, its device has not
					defer close(gate)
					r.rig.(fakeRig).compute.do(func() { <-gate })
					p, err := r.Exchange(nil, []comm.Message{{Peer: 0, View: v}})
					if err == nil && c.limit < 0 {
						time.Sleep(20 * time.Millisecond)
						r.Abort(boom)
					}
					if err == nil {
						err = p.Sync(ctx)
					}
					if comm.IsRemote(err) == (c.limit < 0) {
						return fmt.Errorf("the call ended with %w", err)
					}
					return nil
				}
				p, err := r.Exchange([]comm.Message{{Peer: 1, View: v}}, nil)
				if err != nil {
					return err
				}
				p.Wait()
				for err == nil && ctx.Err() == nil {
					_, err = r.Exchange([]comm.Message{{Peer: 1, View: v}}, nil)
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
				return config{
					host:    hosts[r],
					dev:     dev,
					compute: compute,
					using:   new(sync.Mutex),
					limit:   time.Minute,
					share:   sharedFile{},
				}
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
