package device

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// splitRanks returns a group that is split off one of n ranks with engines.
func splitRanks(t *testing.T, n int) (lib *fakeLibrary, groups []*Group, devices []*fakeDevice) {
	t.Helper()
	lib = &fakeLibrary{}
	lib.engine = lib.subEngine
	world, devices, err := fakeRanks(t, lib, n, Options{})
	if err != nil {
		t.Fatal(err)
	}
	groups = make([]*Group, n)
	each(t, world, func(r int, g *Group) error {
		c, err := g.Split(testContext(t), 0, r)
		if err == nil {
			groups[r] = c.(*Group)
		}
		return err
	})
	if t.Failed() {
		t.FailNow()
	}
	return lib, groups, devices
}

// A group that is split off and only exchanges and gathers over engines does not connect the library. The first
// reduction does, once.
func TestSplitConnectsLate(t *testing.T) {
	const n = 3
	finish := comm.Finish(testContext(t))
	lib, groups, devices := splitRanks(t, n)
	connects := func(what string, want int64) {
		t.Helper()
		if got := lib.joined.Load(); got != want {
			t.Errorf("%s: ranks connected the library %d times, want %d", what, got, want)
		}
	}
	connects("at the start, for the world alone", n)
	each(t, groups, func(r int, g *Group) error {
		all := devices[r].New(tensor.F32, n)
		err := finish(g.AllGather(all, devices[r].of(float32(r+1))))
		if got := values(all); !slices.Equal(got, []float32{1, 2, 3}) {
			t.Errorf("rank %d gathered %v", r, got)
		}
		return err
	})
	connects("after an all-gather", n)
	for _, want := range []float32{6, 18} {
		each(t, groups, func(r int, g *Group) error {
			sum := devices[r].of(float32(r+1) * want / 6)
			err := finish(g.AllReduce(sum, comm.Sum))
			if got := values(sum)[0]; got != want {
				t.Errorf("rank %d: the sum is %g, want %g", r, got, want)
			}
			return err
		})
		connects("after a sum", 2*n)
	}
}

// A group over several nodes connects the library at once: an exchange needs it, which two of the ranks may make alone.
func TestSplitAcrossNodesConnects(t *testing.T) {
	ctx := testContext(t)
	_, groups, devices, err := nodeRanks(t, []int{0, 0, 1}, -1, Options{})
	if err != nil {
		t.Fatal(err)
	}
	each(t, groups, func(r int, g *Group) error {
		c, err := g.Split(ctx, 0, r)
		if err != nil || r == 1 {
			return err
		}
		return comm.Finish(ctx)(c.Exchange(with(2-r, devices[r].of(1)), with(2-r, devices[r].of(0))))
	})
}

// A library that cannot connect fails the call on all ranks, and names the rank.
func TestLateLibraryIsRefused(t *testing.T) {
	lib, groups, devices := splitRanks(t, 2)
	lib.refuse = errors.New("no memory for buffers")
	each(t, groups, func(r int, g *Group) error {
		err := comm.Finish(testContext(t))(g.AllReduce(devices[r].of(1), comm.Sum))
		if err == nil || !strings.Contains(err.Error(), "all-reduce on rank") ||
			!strings.Contains(err.Error(), lib.refuse.Error()) || comm.IsRemote(err) != (r == 1) {
			t.Errorf("rank %d: %v", r, err)
		}
		return nil
	})
}

// A rank that waits in vain for the others to connect reports their abort, and its own Close ends the wait.
func TestEndWhileConnecting(t *testing.T) {
	boom := errors.New("the loss is not a number")
	for name, end := range map[string]func(other, waiting *Group) error{
		"abort": func(other, _ *Group) error { other.Abort(boom); return boom },
		"close": func(_, waiting *Group) error { _ = waiting.Close(); return comm.ErrClosed },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := testContext(t)
			lib, groups, devices := splitRanks(t, 2)
			before, called := lib.joined.Load(), make(chan error)
			go func() { called <- comm.Finish(ctx)(groups[1].AllReduce(devices[1].of(1), comm.Sum)) }()
			for lib.joined.Load() == before && ctx.Err() == nil {
				runtime.Gosched()
			}
			want := end(groups[0], groups[1])
			if err := <-called; !errors.Is(err, want) {
				t.Errorf("the call ended with %v, want %v", err, want)
			}
		})
	}
}

// abortedCalls records the end of collectives.
type abortedCalls struct {
	solo
	aborted chan struct{}
}

func (c *abortedCalls) abort() { close(c.aborted) }

// A library that is connected after the group has ended is freed.
func TestLibraryOfEndedGroup(t *testing.T) {
	_, groups, devices := splitRanks(t, 2)
	g, lib := groups[0], &abortedCalls{aborted: make(chan struct{})}
	g.kit.connect = func(context.Context, *comm.Group, gpuStream, <-chan struct{}) (collectives, error) {
		go g.Close()
		<-g.life.Done()
		return lib, nil
	}
	if err := comm.Finish(testContext(t))(g.AllReduce(devices[0].of(1), comm.Sum)); !errors.Is(err, comm.ErrClosed) {
		t.Errorf("the call ended with %v, want %v", err, comm.ErrClosed)
	}
	select {
	case <-lib.aborted:
	case <-testContext(t).Done():
		t.Error("the library was not freed")
	}
}

// The wait for a library that never connects ends at the deadline.
func TestLibraryThatHangs(t *testing.T) {
	_, groups, _ := splitRanks(t, 2)
	g := groups[0]
	g.kit.connect = func(ctx context.Context, _ *comm.Group, _ gpuStream, _ <-chan struct{}) (collectives, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	g.SetDeadline(50 * time.Millisecond)
	if err := g.library(testContext(t)); !errors.Is(err, comm.ErrDeadline) {
		t.Errorf("it ended with %v, want %v", err, comm.ErrDeadline)
	}
}
