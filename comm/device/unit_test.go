package device

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// TestGroupMovesHostViews moves views of the host over the host's group, after earlier work of the compute stream that
// writes them.
func TestGroupMovesHostViews(t *testing.T) {
	ctx := testContext(t)
	groups, devices, err := fakeRanks(t, &fakeLibrary{}, 2, Options{})
	if err != nil {
		t.Fatal(err)
	}
	each(t, groups, func(r int, g *Group) error {
		v := tensor.New(tensor.F64, 1)
		devices[r].s.HostStream.Do("slow", func() error {
			time.Sleep(5 * time.Millisecond)
			tensor.Data[float64](v)[0] = float64(r + 1)
			return nil
		})
		err := comm.Finish(ctx)(g.AllReduce(v, comm.Sum))
		if got := tensor.Data[float64](v)[0]; got != 3 {
			t.Errorf("rank %d: sum %v, want 3", r, got)
		}
		return err
	})
	far := newFakeDevice(7)
	defer far.Close()
	g, own, host := groups[0], devices[0].of(0, 0, 0, 0), tensor.New(tensor.F32, 2)
	of := func(_ comm.Pending, err error) error { return err }
	for want, err := range map[string]error{
		"lies on fake:7":  of(g.AllReduce(far.New(tensor.F32, 4), comm.Sum)),
		"lies on cpu":     of(g.Exchange(append(with(1, own), with(1, host)...), nil)),
		"not host memory": of(g.AllGather(own, host)),
	} {
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "rank 0 of 2") {
			t.Errorf("error %v, want one with %q and the rank", err, want)
		}
	}
}

// A rank 0 that cannot make the id fails the others at once, with its reason.
func TestGroupWithoutID(t *testing.T) {
	boom := errors.New("no library")
	_, _, err := fakeRanks(t, &fakeLibrary{refuse: boom}, 3, Options{})
	if !errors.Is(err, boom) {
		t.Fatalf("got %v, want %v", err, boom)
	}
	for _, part := range []string{
		"connect devices on rank 0 of 3: no library", "connect devices on rank 2 of 3",
		"rank 0: group aborted: an id for the devices: no library",
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing in %v", part, err)
		}
	}
}

// A recorder is a mover that only records its calls.
type recorder struct {
	mu   sync.Mutex
	said []string // guarded by mu
}

// recorders returns a recorder for each rank of two, and the library that makes them.
func recorders() ([]*recorder, *fakeLibrary) {
	movers := []*recorder{{}, {}}
	return movers, &fakeLibrary{engine: func(_ context.Context, host *comm.Group, _ tensor.Stream) (mover, error) {
		return movers[host.Rank()], nil
	}}
}

func (m *recorder) note(s string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.said = append(m.said, s)
}

func (m *recorder) SetDeadline(time.Duration) {}
func (m *recorder) Streams() []tensor.Stream  { return nil }
func (m *recorder) Waits() []comm.Wait        { return nil }
func (m *recorder) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	for _, s := range send {
		m.note("send " + s.View.DType().String())
	}
	return nil, nil // the tests wait for none
}
func (m *recorder) Abort(error)  { m.note("abort") }
func (m *recorder) Close() error { m.note("close"); return nil }

// TestGroupTransports checks that exchanges and gathers go over the copy engines, and reductions do not.
func TestGroupTransports(t *testing.T) {
	movers, lib := recorders()
	groups, devices, err := fakeRanks(t, lib, 2, Options{})
	if err != nil {
		t.Fatal(err)
	}
	each(t, groups, func(r int, g *Group) error {
		_, err1 := g.Exchange(with(1-r, devices[r].New(tensor.BF16, 2)), nil)
		_, err2 := g.AllGather(devices[r].New(tensor.I64, 2), devices[r].New(tensor.I64, 1))
		err3 := comm.Finish(testContext(t))(g.AllReduce(devices[r].New(tensor.F32, 2), comm.Sum))
		return errors.Join(err1, err2, err3, g.Close())
	})
	want := []string{"send bfloat16", "send int64", "send int64", "close"}
	for r, m := range movers {
		if groups[r].Transport() != TransportCopy || !slices.Equal(m.said, want) {
			t.Errorf("rank %d over %s: %q, want %q", r, groups[r].Transport(), m.said, want)
		}
	}
}

// Engines end if the library cannot connect at the start.
func TestEnginesWithoutLibrary(t *testing.T) {
	movers, lib := recorders()
	lib.refuse = errors.New("no library")
	if _, _, err := fakeRanks(t, lib, 2, Options{}); !errors.Is(err, lib.refuse) {
		t.Errorf("%v, want %v", err, lib.refuse)
	}
	for r, m := range movers {
		if !slices.Equal(m.said, []string{"abort", "close"}) {
			t.Errorf("rank %d: the engines got %q, want an abort and a close", r, m.said)
		}
	}
}

func TestGroupWithoutEngines(t *testing.T) {
	boom := errors.New("no way from here to there")
	lib := &fakeLibrary{engine: func(context.Context, *comm.Group, tensor.Stream) (mover, error) { return nil, boom }}
	groups, _, err := fakeRanks(t, lib, 2, Options{Transport: TransportAuto})
	if err != nil || groups[0].Transport() != TransportNCCL {
		t.Errorf("auto without engines: %v", err)
	}
	// Where they are asked for, the group fails on all ranks, and the one that it was split from
	// goes on.
	ctx := testContext(t)
	each(t, groups, func(_ int, g *Group) error {
		sub, err := g.host.Subgroup(ctx, 0, 0, g.host.Compute())
		if err != nil {
			return err
		}
		if _, err := newGroup(ctx, sub, g.kit, Options{Transport: TransportCopy}, false); !errors.Is(err, boom) ||
			comm.IsRemote(err) {
			t.Errorf("copy without engines: %v, want %v", err, boom)
		}
		return g.Barrier(ctx)
	})
	for want, c := range map[string]struct {
		lib       *fakeLibrary
		transport string
	}{"fake:1 has no copy engines": {&fakeLibrary{}, TransportCopy}, "pigeon": {lib, "pigeon"}} {
		if _, _, err := fakeRanks(t, c.lib, 2, Options{Transport: c.transport}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestGroupClosesOverCalls closes a group with calls in flight: they fail, and the compute stream does not continue
// with their data.
func TestGroupClosesOverCalls(t *testing.T) {
	ctx := testContext(t)
	groups, devices, err := fakeRanks(t, &fakeLibrary{}, 2, Options{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := groups[0].Exchange(nil, with(1, devices[0].New(tensor.F32, 3)))
	if err != nil {
		t.Fatal(err)
	}
	p.Wait()
	if err := groups[0].Close(); err != nil {
		t.Fatal(err)
	}
	_, later := groups[0].AllReduce(devices[0].New(tensor.F32, 3), comm.Sum)
	for what, err := range map[string]error{
		"the pending call": p.Sync(ctx), "the compute stream": devices[0].s.Sync(ctx), "a later call": later,
	} {
		if !errors.Is(err, comm.ErrClosed) {
			t.Errorf("%s ended with %v, want %v", what, err, comm.ErrClosed)
		}
	}
}

// A rank that gives up passes its cause on before its callers learn of it, by an error or by
// the compute stream: if they exit at once, the others would blame this rank.
func TestGroupTellsFirst(t *testing.T) {
	hosts, told := worldtest.SlowHosts(comm.Options{Deadline: 20 * time.Millisecond})
	groups, devices, err := ranksOver(t, &fakeLibrary{}, hosts, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var early atomic.Bool
	devices[0].s.OnFail(func(error) { early.Store(!told()) })
	ctx := testContext(t)
	err = comm.Finish(ctx)(groups[0].Exchange(nil, with(1, devices[0].New(tensor.F32, 3))))
	if told := told(); !told || !errors.Is(err, comm.ErrDeadline) {
		t.Errorf("the call ended with %v, the other rank told: %v", err, told)
	}
	if err := devices[0].s.Sync(ctx); !errors.Is(err, comm.ErrDeadline) || early.Load() {
		t.Errorf("the compute stream ended with %v, before the other rank was told: %v", err, early.Load())
	}
}

// Calls on the device say whom they may wait for, in the order in which the library runs them, and go on
// to say so when the group has ended by a deadline.
func TestGroupWaits(t *testing.T) {
	t.Parallel()
	const n, away = 3, 1
	hosts := comm.NewLocal(n, nil, comm.Options{Deadline: 500 * time.Millisecond})
	groups, devices, err := ranksOver(t, &fakeLibrary{}, hosts, Options{})
	if err != nil {
		t.Fatal(err)
	}
	const label = "step 4/backward/layer 1"
	devices[0].Stream().Label(label)
	var calls [2]comm.Pending
	for i := range calls {
		if calls[i], err = groups[0].AllReduce(devices[0].New(tensor.F32, 100), comm.Sum); err != nil {
			t.Fatal(err)
		}
	}
	calls[0].Wait()
	check := func(when string, ws []comm.Wait) {
		t.Helper()
		if len(ws) != 2 || !ws[0].Begun || !ws[0].Needed || !ws[0].Vague || len(ws[0].Open) != n-1 ||
			ws[0].Open[0].Peer != 1 || ws[0].Bytes != 400 || ws[1].Begun || len(ws[1].Open) > 0 {
			t.Fatalf("%s: %+v", when, ws)
		}
		for i, w := range ws {
			if w.Op != "all-reduce" || w.Label != label || w.Call != uint64(i+1) || w.Via != TransportNCCL ||
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
}
