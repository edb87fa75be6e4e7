package device

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/tensor"
)

// fakeRanks joins n ranks with fake devices and closes them when the test ends.
func fakeRanks(t *testing.T, lib *fakeLibrary, n int, opts Options) ([]*Group, []*FakeDevice, error) {
	devices := make([]*FakeDevice, n)
	for r := range n {
		devices[r] = NewFakeDevice(r)
	}
	groups, err := connectRanks(t, lib, devices, opts)
	return groups, devices, err
}

func connectRanks(t *testing.T, lib *fakeLibrary, devices []*FakeDevice, opts Options) ([]*Group, error) {
	lib.worlds = map[uint64]*local.World{}
	groups, err := fakeDeviceWorld(lib, comm.NewLocal(len(devices), nil, comm.Options{}), devices, opts)
	t.Cleanup(func() {
		for r := range devices {
			if groups[r] != nil {
				if err := groups[r].Close(); err != nil {
					t.Error(err)
				}
			}
			devices[r].Close()
		}
	})
	return groups, err
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestGroupMovesHostViews moves views of the host over the host's group, after earlier work of the compute stream that
// writes them.
func TestGroupMovesHostViews(t *testing.T) {
	ctx := testContext(t)
	groups, devices, err := fakeRanks(t, &fakeLibrary{}, 2, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			v := tensor.New(tensor.F64, 1)
			devices[r].s.HostStream.Do("slow", func() error {
				time.Sleep(5 * time.Millisecond)
				tensor.Data[float64](v)[0] = float64(r + 1)
				return nil
			})
			p, err := g.AllReduce(v, comm.Sum)
			if err == nil {
				err = p.Sync(ctx)
			}
			if got := tensor.Data[float64](v)[0]; err != nil || got != 3 {
				t.Errorf("rank %d: sum %v, error %v; want 3", r, got, err)
			}
		})
	}
	wg.Wait()
	f := devices[0]
	far := NewFakeDevice(7)
	defer far.Close()
	for want, call := range map[string]func() (comm.Pending, error){
		"lies on fake:7": func() (comm.Pending, error) { return groups[0].AllReduce(far.New(tensor.F32, 4), comm.Sum) },
		"lies on cpu": func() (comm.Pending, error) {
			return groups[0].Exchange([]comm.Message{{Peer: 1, View: f.New(tensor.F32, 1)}, {Peer: 1, View: tensor.New(tensor.F32, 1)}}, nil)
		},
		"not host memory": func() (comm.Pending, error) {
			return groups[0].AllGather(f.New(tensor.F32, 4), tensor.New(tensor.F32, 2))
		},
	} {
		if _, err := call(); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "rank 0 of 2") {
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
	for _, part := range []string{"connect devices on rank 0 of 3: no library", "connect devices on rank 2 of 3", "rank 0: group aborted: an id for the devices: no library"} {
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
	return nothingPending{}, nil
}
func (m *recorder) Abort(error)  { m.note("abort") }
func (m *recorder) Close() error { m.note("close"); return nil }

type nothingPending struct{}

func (nothingPending) Wait()                      {}
func (nothingPending) Sync(context.Context) error { return nil }

// TestGroupTransports checks that exchanges and gathers go over the copy engines, and reductions do not.
func TestGroupTransports(t *testing.T) {
	ctx := testContext(t)
	movers := []*recorder{{}, {}}
	lib := &fakeLibrary{
		engine: func(_ context.Context, host *comm.Group) (mover, error) { return movers[host.Rank()], nil },
	}
	groups, devices, err := fakeRanks(t, lib, 2, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			v := func(d tensor.DType) tensor.View { return devices[r].New(d, 2) }
			_, err1 := g.Exchange([]comm.Message{{Peer: 1 - r, View: v(tensor.BF16)}}, nil)
			_, err2 := g.AllGather(v(tensor.I64), devices[r].New(tensor.I64, 1))
			p, err3 := g.AllReduce(v(tensor.F32), comm.Sum)
			if err := errors.Join(err1, err2, err3, p.Sync(ctx)); err != nil {
				t.Error(err)
			}
			g.Close()
		})
	}
	wg.Wait()
	want := []string{"send bfloat16", "send int64", "send int64", "close"}
	for r, m := range movers {
		if groups[r].Transport() != TransportCopy || !slices.Equal(m.said, want) {
			t.Errorf("rank %d over %s: %q, want %q", r, groups[r].Transport(), m.said, want)
		}
	}
}

func TestGroupWithoutEngines(t *testing.T) {
	boom := errors.New("no way from here to there")
	lib := &fakeLibrary{engine: func(context.Context, *comm.Group) (mover, error) { return nil, boom }}
	groups, _, err := fakeRanks(t, lib, 2, Options{Transport: TransportAuto})
	if err != nil || groups[0].Transport() != TransportNCCL {
		t.Errorf("auto without engines: %v", err)
	}
	// Where they are asked for, the group fails on all ranks, and the one that it was split from
	// goes on.
	ctx := testContext(t)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			sub, err := g.host.Subgroup(ctx, 0, 0, g.host.Compute())
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := newGroup(ctx, sub, g.kit, Options{Transport: TransportCopy}, false); !errors.Is(err, boom) ||
				comm.IsRemote(err) {
				t.Errorf("copy without engines: %v, want %v", err, boom)
			}
			if err := g.Barrier(ctx); err != nil {
				t.Errorf("the first group: %v", err)
			}
		})
	}
	wg.Wait()
	if _, _, err := fakeRanks(t, &fakeLibrary{}, 2, Options{Transport: TransportCopy}); err == nil ||
		!strings.Contains(err.Error(), "fake:1 has no copy engines") {
		t.Errorf("copy on a device that has none: %v", err)
	}
	if _, _, err := fakeRanks(t, lib, 1, Options{Transport: "pigeon"}); err == nil ||
		!strings.Contains(err.Error(), "pigeon") {
		t.Errorf("an unknown transport: %v", err)
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
	p, err := groups[0].Exchange(nil, []comm.Message{{Peer: 1, View: devices[0].New(tensor.F32, 3)}})
	if err != nil {
		t.Fatal(err)
	}
	p.Wait()
	if err := groups[0].Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(ctx); !errors.Is(err, comm.ErrClosed) {
		t.Errorf("the pending call ended with %v, want %v", err, comm.ErrClosed)
	}
	if err := devices[0].s.Sync(ctx); !errors.Is(err, comm.ErrClosed) {
		t.Errorf("the compute stream ended with %v, want %v", err, comm.ErrClosed)
	}
	if _, err := groups[0].AllReduce(devices[0].New(tensor.F32, 3), comm.Sum); !errors.Is(err, comm.ErrClosed) {
		t.Errorf("a call on the closed group: %v, want %v", err, comm.ErrClosed)
	}
}
