package comm_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// await polls until the waits of g are as ok wants them.
func await(t *testing.T, g *comm.Group, ok func([]comm.Wait) bool) []comm.Wait {
	t.Helper()
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		ws := g.Waits()
		if ok(ws) {
			return ws
		}
		if time.Since(start) > 20*time.Second {
			t.Fatalf("rank %d waits %+v", g.Rank(), ws)
		}
	}
}

// peers returns the peers of a call's open messages, each once.
func peers(w comm.Wait) []int {
	all := map[int]bool{}
	for _, o := range w.Open {
		all[o.Peer] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// held reports whether ws is one call that has begun and waits for these peers.
func held(peer ...int) func(ws []comm.Wait) bool {
	return func(ws []comm.Wait) bool {
		return len(ws) == 1 && ws[0].Begun && (ws[0].Needed || ws[0].Called) && slices.Equal(peers(ws[0]), peer)
	}
}

// TestWaitsNameWhoStaysAway keeps one rank away from a collective. All others report a wait for that rank alone, and
// none after it has come.
func TestWaitsNameWhoStaysAway(t *testing.T) {
	const n, away = 4, 3
	for name, w := range map[string]world{"local": localWorld, "unix": unixWorld, "tcp": tcpWorld} {
		t.Run(name, func(t *testing.T) {
			groups := w(t, 0, make([]tensor.Stream, n), comm.Options{})
			defer closeAll(groups)
			reduce := func(g *comm.Group) error {
				return comm.Finish(t.Context())(g.AllReduce(tensor.New(tensor.F32, 1000), comm.Sum))
			}
			everyone(t, groups, reduce)
			var others sync.WaitGroup
			others.Go(func() { everyone(t, groups[:away], reduce) })
			for _, g := range groups[:away] {
				got := await(t, g, held(away))[0]
				if got.Op != "all-reduce" || got.Group != 0 || got.Call != 2 || got.Vague || got.Bytes < 4000 ||
					got.Since.IsZero() {
					t.Errorf("rank %d: %+v", g.Rank(), got)
				}
			}
			if ws := groups[away].Waits(); len(ws) > 0 {
				t.Errorf("rank %d, which stays away, waits %+v", away, ws)
			}
			if err := reduce(groups[away]); err != nil {
				t.Error(err)
			}
			others.Wait()
			for _, g := range groups {
				if ws := g.Waits(); len(ws) > 0 {
					t.Errorf("rank %d waits %+v when all is over", g.Rank(), ws)
				}
			}
		})
	}
}

// TestWaitsTellWhatIsNeeded makes a call that the compute stream waits for, a later one without waiters, and one in a
// split group. Each has the label of its time.
func TestWaitsTellWhatIsNeeded(t *testing.T) {
	compute := []tensor.Stream{tensor.NewHostStream("compute"), tensor.NewHostStream("compute")}
	groups := comm.NewLocal(2, compute, comm.Options{})
	defer func() {
		closeAll(groups)
		for _, s := range compute {
			s.(*tensor.HostStream).Close()
		}
	}()
	apart := make([]comm.Communicator, 2)
	everyone(t, groups, func(g *comm.Group) (err error) {
		apart[g.Rank()], err = g.Split(t.Context(), 0, g.Rank())
		return err
	})
	swap := func(c comm.Communicator) comm.Pending {
		peer := 1 - c.Rank()
		p, err := c.Exchange(with(peer, tensor.New(tensor.F32, 10)), with(peer, tensor.New(tensor.F32, 10)))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	compute[0].Label("step 3/forward/layer 1")
	first := swap(groups[0])
	first.Wait()
	compute[0].Label("step 3/forward/layer 2")
	second, third := swap(groups[0]), swap(apart[0])
	ws := await(t, groups[0], func(ws []comm.Wait) bool {
		return len(ws) == 3 && ws[0].Begun && ws[0].Needed && !ws[0].Called
	})
	if w := ws[0]; w.Label != "step 3/forward/layer 1" || w.Bytes != 80 || len(w.Open) != 2 || w.Open[0].Peer != 1 ||
		w.Open[0].Bytes != 40 || w.Open[0].Send == w.Open[1].Send {
		t.Errorf("the first call: %+v", w)
	}
	// Both follow the first, which the compute stream waits for.
	for _, w := range ws[1:] {
		if w.Begun || w.Needed || w.Called || w.Label != "step 3/forward/layer 2" || len(w.Open) > 0 {
			t.Errorf("a later call: %+v", w)
		}
	}
	if ws[1].Group != 0 || ws[1].Call != ws[0].Call+1 || ws[2].Group == 0 {
		t.Errorf("calls of two groups: %+v", ws)
	}
	swap(groups[1])
	swap(groups[1])
	swap(apart[1])
	for _, p := range []comm.Pending{first, second, third} {
		if err := p.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestWaitsAreKept fails a world by a deadline. Afterwards each rank reports its waits of that time.
func TestWaitsAreKept(t *testing.T) {
	const n, away = 3, 1
	groups := unixWorld(t, 0, make([]tensor.Stream, n), comm.Options{Deadline: 200 * time.Millisecond})
	defer closeAll(groups)
	everyone(t, []*comm.Group{groups[0], groups[2]}, func(g *comm.Group) error {
		if err := g.Barrier(t.Context()); !errors.Is(err, comm.ErrDeadline) {
			return fmt.Errorf("the barrier ended with %w", err)
		}
		return nil
	})
	for _, r := range []int{0, 2} {
		ws := groups[r].Waits()
		if !held(away)(ws) || ws[0].Op != "barrier" || time.Since(ws[0].Since) < 200*time.Millisecond {
			t.Errorf("rank %d: %+v", r, ws)
		}
	}
	if ws := groups[away].Waits(); len(ws) > 0 {
		t.Errorf("rank %d: %+v", away, ws)
	}
}

// TestWaitsAreBounded makes more calls than Waits reports, with more messages than it reports of one.
func TestWaitsAreBounded(t *testing.T) {
	const n = 100
	groups := comm.NewLocal(n, nil, comm.Options{})
	defer closeAll(groups)
	var send, recv []comm.Message
	for peer := 1; peer < n; peer++ {
		send = append(send, with(peer, tensor.New(tensor.F32, 1))...)
		recv = append(recv, with(peer, tensor.New(tensor.F32, 1))...)
	}
	for range n {
		if _, err := groups[0].Exchange(send, recv); err != nil {
			t.Fatal(err)
		}
	}
	ws := await(t, groups[0], func(ws []comm.Wait) bool { return len(ws) > 0 && ws[0].Begun })
	if len(ws) != 16 || len(ws[0].Open) != 64 || ws[0].More != 2*(n-1)-64 || ws[0].Bytes != 2*(n-1)*4 {
		t.Errorf("%d calls, the first with %d messages, %d more, %d bytes", len(ws), len(ws[0].Open), ws[0].More, ws[0].Bytes)
	}
}

// TestWaitsBesideCalls asks all the time, while calls of all kinds are made. It is for the race detector.
func TestWaitsBesideCalls(t *testing.T) {
	const n = 3
	groups := unixWorld(t, 0, make([]tensor.Stream, n), comm.Options{})
	defer closeAll(groups)
	ctx, cancel := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	for _, g := range groups {
		asking.Go(func() {
			for ctx.Err() == nil {
				for _, w := range g.Waits() {
					if w.Op == "" || w.Call == 0 || len(w.Open) > 2*(n-1) || len(w.Open) > 0 && !w.Begun {
						t.Errorf("%+v", w)
					}
				}
				runtime.Gosched()
			}
		})
	}
	everyone(t, groups, func(g *comm.Group) error {
		for i := range 10 {
			p, err := g.AllReduce(tensor.New(tensor.F32, 1+i*5000), comm.Sum)
			if err == nil {
				err = swapAt(ctx, g, 1)
			}
			if err := comm.Finish(ctx)(p, err); err != nil {
				return err
			}
		}
		return g.Barrier(ctx)
	})
	cancel()
	asking.Wait()
}
