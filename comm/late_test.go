package comm_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// TestConnectionsOnFirstUse counts the connections of 32 ranks, by the bound that they have by
// default: with neighbours at first, which is all that collectives of the world need, then with those
// of a small group, and with the peers of an exchange.
func TestConnectionsOnFirstUse(t *testing.T) {
	const n = 32
	ctx, met, want := t.Context(), make([]map[int]bool, n), make([]map[int]bool, n) // by rank: its connections
	for r := range n {
		met[r], want[r] = map[int]bool{}, map[int]bool{}
		for d := 1; d < n; d *= 2 {
			want[r][(r+d)%n], want[r][(r-d+n)%n] = true, true
		}
	}
	var mu sync.Mutex // guards met
	log := func(format string, args ...any) {
		if strings.Contains(format, "connected to rank") {
			mu.Lock()
			defer mu.Unlock()
			met[args[0].(int)][args[1].(int)] = true
		}
	}
	groups := unixWorld(t, 0, make([]tensor.Stream, n), comm.Options{Log: log})
	defer closeAll(groups)
	check := func(after string) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		for r := range n {
			if !maps.Equal(met[r], want[r]) {
				t.Errorf("after %s rank %d is connected with %v, want %v", after, r, met[r], want[r])
			}
		}
	}
	split := make([]comm.Communicator, n)
	everyone(t, groups, func(g *comm.Group) (err error) {
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		for _, size := range []int{3, 100_000} {
			if err := comm.Finish(ctx)(g.AllReduce(tensor.New(tensor.F32, size), comm.Sum)); err != nil {
				return err
			}
		}
		if err := swapAt(ctx, g, 1); err != nil {
			return err
		}
		split[g.Rank()], err = g.Split(ctx, g.Rank()/8, 0)
		return err
	})
	check("collectives of the world")
	everyone(t, groups, func(g *comm.Group) error { return split[g.Rank()].Barrier(ctx) })
	for r := range n {
		for k := range 8 {
			if other := r/8*8 + k; other != r {
				want[r][other] = true
			}
		}
	}
	check("a barrier of groups of 8")
	everyone(t, groups, func(g *comm.Group) error { return swapAt(ctx, g, 11) })
	for r := range n {
		want[r][(r+11)%n], want[r][(r+n-11)%n] = true, true
	}
	check("an exchange")
}

// TestLateFromBothSides lets all pairs of ranks, most of them unconnected, send to each other at once from both sides,
// many times.
func TestLateFromBothSides(t *testing.T) {
	const n = 11
	for name, w := range map[string]world{"unix": unixWorld, "tcp": tcpWorld, "mixed": mixedWorld} {
		t.Run(name, func(t *testing.T) {
			for range repeats(5) {
				groups := w(t, 1, make([]tensor.Stream, n), comm.Options{})
				everyone(t, groups, func(g *comm.Group) (err error) {
					for d := 1; d < n && err == nil; d++ {
						err = swapAt(t.Context(), g, d)
					}
					return err
				})
				closeAll(groups)
			}
		})
	}
}

// repeats returns how often a test repeats: n times, or once or twice in the short form.
func repeats(n int) int {
	if testing.Short() {
		return (n + 9) / 10
	}
	return n
}

// TestLateWithOneThatLeaves lets unconnected ranks exchange with one that leaves after its sends, whether its message
// or the news of its departure comes first. Later sends to it fail.
func TestLateWithOneThatLeaves(t *testing.T) {
	const n, leaver = 9, 4
	for _, peer := range []int{1, 7} { // which the leaver calls and dials; neither is a neighbour
		for range repeats(20) {
			groups := unixWorld(t, 1, make([]tensor.Stream, n), comm.Options{})
			finish, v := comm.Finish(t.Context()), tensor.New(tensor.F32, 10)
			everyone(t, []*comm.Group{groups[leaver], groups[peer]}, func(g *comm.Group) error {
				if g.Rank() == leaver {
					return errors.Join(finish(g.Exchange(with(peer, v), nil)), g.Close())
				}
				return finish(g.Exchange(nil, with(leaver, tensor.New(tensor.F32, 10))))
			})
			other := 8 - peer // has not talked to it, and is no neighbour either
			err := finish(groups[other].Exchange(with(leaver, v), with(leaver, v)))
			if err := blames(err, leaver, comm.ErrPeerLeft); err != nil {
				t.Errorf("rank %d: %v", other, err)
			}
			closeAll(groups)
		}
	}
}

// TestLateWithOneThatAborts aborts a rank while others connect to it. All learn the cause.
func TestLateWithOneThatAborts(t *testing.T) {
	const n, culprit = 9, 4
	spoiled := errors.New("the loss is not a number")
	for range repeats(20) {
		groups := unixWorld(t, 1, make([]tensor.Stream, n), comm.Options{})
		everyone(t, groups, func(g *comm.Group) (err error) {
			if g.Rank() == culprit {
				g.Abort(spoiled)
				return nil
			}
			for err == nil {
				err = swap(t.Context(), g, culprit, culprit)
			}
			if !strings.Contains(err.Error(), spoiled.Error()) {
				t.Errorf("rank %d: %v, want %q", g.Rank(), err, spoiled)
			}
			return blames(err, culprit, comm.ErrAborted)
		})
		closeAll(groups)
	}
}

// TestLateUnreachable makes a rank unreachable. At the deadline the dialer reports why, and a rank that called it
// reports that it did not dial.
func TestLateUnreachable(t *testing.T) {
	const n = 9
	nowhere, closed := listeners(t, "127.0.0.1", 1)
	nowhere[0].Close()
	lns, addrs := listeners(t, "127.0.0.1", n)
	w := worldOf(func(testing.TB, int) func(rank int) comm.Mesh {
		return func(r int) comm.Mesh {
			reach := slices.Clone(addrs)
			if r == 7 { // which is no neighbour of rank 4
				reach[4] = closed[0]
			}
			return comm.Mesh{Listener: lns[r], Addrs: reach}
		}
	})
	groups := w(t, 1, make([]tensor.Stream, n), comm.Options{Deadline: 300 * time.Millisecond})
	defer closeAll(groups)
	// Whoever comes first to its deadline says it for both.
	reasons := map[int]string{7: "it has been called and has not dialled", 4: "connection refused"}
	everyone(t, []*comm.Group{groups[4], groups[7]}, func(g *comm.Group) error {
		err := swap(t.Context(), g, 11-g.Rank(), 11-g.Rank())
		var pe *comm.PeerError
		if !errors.As(err, &pe) || !errors.Is(err, comm.ErrDeadline) || reasons[pe.Rank] == "" ||
			!strings.Contains(err.Error(), reasons[pe.Rank]) {
			return fmt.Errorf("the call ended with %w", err)
		}
		return nil
	})
}

// A call of a rank that gives up returns once the other ranks know why: if its caller exits at once, they would
// blame this rank.
func TestCallsTellFirst(t *testing.T) {
	hosts, told := worldtest.SlowHosts(comm.Options{Deadline: 20 * time.Millisecond})
	err := hosts[0].Barrier(t.Context())
	if known := told(); !known || !errors.Is(err, comm.ErrDeadline) {
		t.Errorf("the call ended with %v; the other rank knows: %t", err, known)
	}
	everyone(t, hosts, (*comm.Group).Close)
}

// A closed part of a world refuses calls, and the world goes on.
func TestCallsOnAClosedPart(t *testing.T) {
	world := comm.NewLocal(1, nil, comm.Options{})[0]
	defer world.Close()
	part, err := world.Split(t.Context(), 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(part.Barrier(t.Context()), part.Close()); err != nil {
		t.Fatal(err)
	}
	if err := part.Barrier(t.Context()); !errors.Is(err, comm.ErrClosed) {
		t.Errorf("a call on the closed part: %v, want %v", err, comm.ErrClosed)
	}
	if err := world.Barrier(t.Context()); err != nil {
		t.Errorf("the world after its part: %v", err)
	}
}

// TestDeadlineOfLateRank lets rank 1 of a ring stay away and rank 3 come late: within the deadline of rank 4, or during
// its second look. When rank 4 gives up, rank 3 also waits, with most of its deadline ahead. It must have announced its
// wait, so that all ranks blame rank 1. The delays are longer than the second look, so that rank 3 cannot announce it at
// its own deadline.
func TestDeadlineOfLateRank(t *testing.T) {
	const silent, tardy, n = 1, 3, 9
	calls := map[string]func(ctx context.Context, g *comm.Group) error{
		"barrier": func(ctx context.Context, g *comm.Group) error { return g.Barrier(ctx) },
		"ring": func(ctx context.Context, g *comm.Group) error {
			return comm.Finish(ctx)(g.Exchange(nil, with((g.Rank()+n-1)%n, tensor.New(tensor.F32, 10))))
		},
	}
	for name, w := range map[string]world{"local": localWorld, "unix": unixWorld} {
		for call, late := range map[string]time.Duration{"ring": 1100 * time.Millisecond, "barrier": 2 * time.Second} {
			t.Run(name+" "+call, func(t *testing.T) {
				t.Parallel()
				groups := w(t, 1, make([]tensor.Stream, n), comm.Options{Deadline: 1500 * time.Millisecond})
				defer closeAll(groups)
				everyone(t, groups, func(g *comm.Group) error { return g.Barrier(t.Context()) })
				everyone(t, groups, func(g *comm.Group) error {
					switch g.Rank() {
					case silent:
						return nil
					case tardy:
						time.Sleep(late)
					}
					return blames(calls[call](t.Context(), g), silent, comm.ErrDeadline)
				})
			})
		}
	}
}
