package comm

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/tensor"
)

// fakeRanks joins n ranks with fake devices and closes them when the test ends.
func fakeRanks(t *testing.T, lib *fakeLibrary, n int, opts DeviceOptions) ([]*DeviceGroup, []*FakeDevice, error) {
	lib.worlds = map[uint64]*localWorld{}
	devices := make([]*FakeDevice, n)
	for r := range n {
		devices[r] = NewFakeDevice(r)
	}
	groups, err := fakeDeviceWorld(lib, NewLocal(n, nil, Options{}), devices, opts)
	t.Cleanup(func() {
		for r := range n {
			if groups[r] != nil {
				if err := groups[r].Close(); err != nil {
					t.Error(err)
				}
			}
			devices[r].Close()
		}
	})
	return groups, devices, err
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Views of the host move over the host's group, behind what the compute stream is still to
// write into them.
func TestDeviceGroupMovesHostViews(t *testing.T) {
	ctx := testContext(t)
	groups, devices, err := fakeRanks(t, &fakeLibrary{}, 2, DeviceOptions{})
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
			p, err := g.AllReduce(v, Sum)
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
	for want, call := range map[string]func() (Pending, error){
		"lies on fake:7": func() (Pending, error) { return groups[0].AllReduce(far.New(tensor.F32, 4), Sum) },
		"lies on cpu": func() (Pending, error) {
			return groups[0].Exchange([]Message{{1, f.New(tensor.F32, 1)}, {1, tensor.New(tensor.F32, 1)}}, nil)
		},
		"not host memory": func() (Pending, error) {
			return groups[0].AllGather(f.New(tensor.F32, 4), tensor.New(tensor.F32, 2))
		},
	} {
		if _, err := call(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "rank 0 of 2") {
			t.Errorf("error %v, want one with %q and the rank", err, want)
		}
	}
}

// A rank 0 that cannot make the id fails the others at once, with its reason.
func TestDeviceGroupWithoutID(t *testing.T) {
	boom := errors.New("no library")
	_, _, err := fakeRanks(t, &fakeLibrary{refuse: boom}, 3, DeviceOptions{})
	if !errors.Is(err, boom) {
		t.Fatalf("got %v, want %v", err, boom)
	}
	for _, part := range []string{"connect devices on rank 0 of 3: no library", "connect devices on rank 2 of 3", "rank 0: group aborted: an id for the devices: no library"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing in %v", part, err)
		}
	}
}

// recorder is a mover that only notes what it is asked.
type recorder struct {
	mu   sync.Mutex
	said []string // guarded by mu
}

func (m *recorder) note(s string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.said = append(m.said, s)
}

func (m *recorder) exchange(send, recv []Message) (Pending, error) {
	for _, s := range send {
		m.note("send " + s.View.DType().String())
	}
	return nothingPending{}, nil
}
func (m *recorder) abort(error)  { m.note("abort") }
func (m *recorder) close() error { m.note("close"); return nil }

type nothingPending struct{}

func (nothingPending) Wait()                      {}
func (nothingPending) Sync(context.Context) error { return nil }

// Exchanges, and what is made of them, go over the copy engines; reductions do not.
func TestDeviceGroupTransports(t *testing.T) {
	ctx := testContext(t)
	movers := []*recorder{{}, {}}
	lib := &fakeLibrary{engine: func(_ context.Context, host *Group) (mover, error) { return movers[host.Rank()], nil }}
	groups, devices, err := fakeRanks(t, lib, 2, DeviceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			v := func(d tensor.DType) View { return devices[r].New(d, 2) }
			_, err1 := g.Exchange([]Message{{1 - r, v(tensor.BF16)}}, nil)
			_, err2 := g.AllGather(v(tensor.I64), devices[r].New(tensor.I64, 1))
			_, err3 := g.AllToAll(v(tensor.U8), v(tensor.U8))
			p, err4 := g.AllReduce(v(tensor.F32), Sum)
			if err := errors.Join(err1, err2, err3, err4, p.Sync(ctx)); err != nil {
				t.Error(err)
			}
			g.Close()
		})
	}
	wg.Wait()
	want := []string{"send bfloat16", "send int64", "send int64", "send uint8", "send uint8", "close"}
	for r, m := range movers {
		if groups[r].Transport() != TransportCopy || !slices.Equal(m.said, want) {
			t.Errorf("rank %d over %s: %q, want %q", r, groups[r].Transport(), m.said, want)
		}
	}
}

func TestDeviceGroupWithoutEngines(t *testing.T) {
	boom := errors.New("no way from here to there")
	lib := &fakeLibrary{engine: func(context.Context, *Group) (mover, error) { return nil, boom }}
	groups, _, err := fakeRanks(t, lib, 2, DeviceOptions{Transport: TransportAuto})
	if err != nil || groups[0].Transport() != TransportNCCL {
		t.Errorf("auto without engines: %v", err)
	}
	// Where they are asked for, the group fails on all ranks, and the one that it was split from
	// goes on.
	ctx := testContext(t)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			sub, err := g.host.Split(ctx, 0, 0)
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := newDeviceGroup(ctx, sub.(*Group), g.kit, DeviceOptions{Transport: TransportCopy}); !errors.Is(err, boom) || IsRemote(err) {
				t.Errorf("copy without engines: %v, want %v", err, boom)
			}
			if err := g.Barrier(ctx); err != nil {
				t.Errorf("the first group: %v", err)
			}
		})
	}
	wg.Wait()
	if _, _, err := fakeRanks(t, &fakeLibrary{}, 2, DeviceOptions{Transport: TransportCopy}); err == nil || !strings.Contains(err.Error(), "fake:1 has no copy engines") {
		t.Errorf("copy on a device that has none: %v", err)
	}
	if _, _, err := fakeRanks(t, lib, 1, DeviceOptions{Transport: "pigeon"}); err == nil || !strings.Contains(err.Error(), "auto, nccl and copy") {
		t.Errorf("an unknown transport: %v", err)
	}
}

// Who closes a group with calls in flight gets them back as errors, and the compute stream does
// not go on with what they were to bring.
func TestDeviceGroupClosesOverCalls(t *testing.T) {
	ctx := testContext(t)
	groups, devices, err := fakeRanks(t, &fakeLibrary{}, 2, DeviceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := groups[0].Exchange(nil, []Message{{1, devices[0].New(tensor.F32, 3)}})
	if err != nil {
		t.Fatal(err)
	}
	p.Wait()
	if err := groups[0].Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(ctx); !errors.Is(err, ErrClosed) {
		t.Errorf("the pending call ended with %v, want %v", err, ErrClosed)
	}
	if err := devices[0].s.Sync(ctx); !errors.Is(err, ErrClosed) {
		t.Errorf("the compute stream ended with %v, want %v", err, ErrClosed)
	}
	if _, err := groups[0].AllReduce(devices[0].New(tensor.F32, 3), Sum); !errors.Is(err, ErrClosed) {
		t.Errorf("a call on the closed group: %v, want %v", err, ErrClosed)
	}
}
