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

// meetings records the connections that the ranks of a world log.
type meetings struct {
	logs
	mu  sync.Mutex
	met []map[int]bool // guarded by mu; per rank, those it is connected with
}

func newMeetings(n int) *meetings {
	m := &meetings{met: make([]map[int]bool, n)}
	for r := range m.met {
		m.met[r] = map[int]bool{}
	}
	return m
}

// log records a line of a rank.
func (m *meetings) log(format string, args ...any) {
	m.add(format, args...)
	if strings.Contains(format, "connected to rank") {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.met[args[0].(int)][args[1].(int)] = true
	}
}

// of returns whom a rank is connected with.
func (m *meetings) of(rank int) []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.met[rank]))
}

// finish waits for a call.
func finish(ctx context.Context, p comm.Pending, err error) error {
	if err != nil {
		return err
	}
	return p.Sync(ctx)
}

// swap exchanges a number with two ranks and checks the received one.
func swap(ctx context.Context, g *comm.Group, to, from int) error {
	out, in := tensor.FromSlice([]int32{int32(g.Rank())}, 1), tensor.New(tensor.I32, 1)
	p, err := g.Exchange([]comm.Message{{Peer: to, View: out}}, []comm.Message{{Peer: from, View: in}})
	if err := finish(ctx, p, err); err != nil {
		return err
	}
	if got := tensor.Data[int32](in)[0]; int(got) != from {
		return fmt.Errorf("rank %d sent %d", from, got)
	}
	return nil
}

// TestConnectionsOnFirstUse counts the connections of 64 ranks, by the bound that they have by
// default: with neighbours at first, which is all that collectives of the world need, then with those
// of a small group, and with the peers of an exchange.
func TestConnectionsOnFirstUse(t *testing.T) {
	const n = 64
	ctx, m := t.Context(), newMeetings(n)
	groups := unixWorld(t, 0, make([]tensor.Stream, n), comm.Options{Log: m.log})
	defer closeAll(groups)
	want := make([]map[int]bool, n)
	for r := range n {
		want[r] = map[int]bool{}
		for d := 1; d < n; d *= 2 {
			want[r][(r+d)%n], want[r][(r-d+n)%n] = true, true
		}
	}
	check := func(after string) {
		t.Helper()
		for r := range n {
			if got, want := m.of(r), slices.Sorted(maps.Keys(want[r])); !slices.Equal(got, want) {
				t.Errorf("after %s rank %d is connected with %v, want %v", after, r, got, want)
			}
		}
	}
	split := make([]comm.Communicator, n)
	everyone(t, groups, func(g *comm.Group) (err error) {
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		for _, size := range []int{3, 100_000} {
			p, err := g.AllReduce(tensor.New(tensor.F32, size), comm.Sum)
			if err := finish(ctx, p, err); err != nil {
				return err
			}
		}
		if err := swap(ctx, g, (g.Rank()+1)%n, (g.Rank()+n-1)%n); err != nil {
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
	everyone(t, groups, func(g *comm.Group) error { return swap(ctx, g, (g.Rank()+21)%n, (g.Rank()+n-21)%n) })
	for r := range n {
		want[r][(r+21)%n], want[r][(r+n-21)%n] = true, true
	}
	check("an exchange")
}

// TestLateFromBothSides lets all pairs of ranks, most of them unconnected, send to each other at once from both sides,
// many times.
func TestLateFromBothSides(t *testing.T) {
	const n = 11
	for name, w := range map[string]world{"unix": unixWorld, "tcp": tcpWorld, "mixed": mixedWorld} {
		t.Run(name, func(t *testing.T) {
			for range 5 {
				groups := w(t, 1, make([]tensor.Stream, n), comm.Options{})
				everyone(t, groups, func(g *comm.Group) error {
					for d := range n - 1 {
						if err := swap(t.Context(), g, (g.Rank()+d+1)%n, (g.Rank()+n-d-1)%n); err != nil {
							return err
						}
					}
					return nil
				})
				closeAll(groups)
			}
		})
	}
}

// TestLateWithOneThatLeaves has ranks that are not connected talk to one that leaves as soon as it has
// sent, whatever comes first, its message or the word of others that it has left. Then ranks talk to
// it that it expects nothing of, and are told.
func TestLateWithOneThatLeaves(t *testing.T) {
	const n, leaver = 9, 4
	for _, peer := range []int{1, 7} { // which the leaver calls and dials; neither is a neighbour
		for range 20 {
			groups := unixWorld(t, 1, make([]tensor.Stream, n), comm.Options{})
			v := tensor.New(tensor.F32, 10)
			message := func(peer int) []comm.Message { return []comm.Message{{Peer: peer, View: v}} }
			everyone(t, []*comm.Group{groups[leaver], groups[peer]}, func(g *comm.Group) error {
				if g.Rank() == leaver {
					p, err := g.Exchange(message(peer), nil)
					if err := finish(t.Context(), p, err); err != nil {
						return err
					}
					return g.Close()
				}
				in := tensor.New(tensor.F32, 10)
				p, err := g.Exchange(nil, []comm.Message{{Peer: leaver, View: in}})
				return finish(t.Context(), p, err)
			})
			other := 8 - peer // has not talked to it, and is no neighbour either
			p, err := groups[other].Exchange(message(leaver), message(leaver))
			err = finish(t.Context(), p, err)
			var pe *comm.PeerError
			if !errors.As(err, &pe) || pe.Rank != leaver || !errors.Is(err, comm.ErrPeerLeft) {
				t.Errorf("rank %d: %v, want rank %d and %q", other, err, leaver, comm.ErrPeerLeft)
			}
			closeAll(groups)
		}
	}
}

// TestLateWithOneThatAborts has a rank abort while others begin to talk to it. All learn why.
func TestLateWithOneThatAborts(t *testing.T) {
	const n, culprit = 9, 4
	spoiled := errors.New("the loss is not a number")
	for range 20 {
		groups := unixWorld(t, 1, make([]tensor.Stream, n), comm.Options{})
		everyone(t, groups, func(g *comm.Group) error {
			if g.Rank() == culprit {
				g.Abort(spoiled)
				return nil
			}
			var err error
			for err == nil {
				err = swap(t.Context(), g, culprit, culprit)
			}
			var pe *comm.PeerError
			if !errors.As(err, &pe) || pe.Rank != culprit || !errors.Is(err, comm.ErrAborted) ||
				!strings.Contains(err.Error(), spoiled.Error()) {
				return fmt.Errorf("%w, want rank %d and %q", err, culprit, spoiled)
			}
			return nil
		})
		closeAll(groups)
	}
}

// TestLateUnreachable makes a rank unreachable. At the deadline the dialer reports why, and a rank that called it
// reports that it did not dial.
func TestLateUnreachable(t *testing.T) {
	const n = 9
	lns, addrs := listeners(t, n)
	nowhere, closed := listeners(t, 1)
	nowhere[0].Close()
	key := worldtest.Secret()
	groups := worldtest.Join(t, n, func(r int) (*comm.Group, error) {
		reach := slices.Clone(addrs)
		if r == 7 { // which is no neighbour of rank 4
			reach[4] = closed[0]
		}
		m := comm.Mesh{Listener: lns[r], Addrs: reach, Rank: r, Size: n, Secret: key}
		return comm.Connect(t.Context(), m.Few(1), nil, comm.Options{Deadline: 300 * time.Millisecond})
	})
	defer closeAll(groups)
	var failed sync.WaitGroup
	for _, r := range []int{4, 7} {
		failed.Go(func() {
			err := swap(t.Context(), groups[r], 11-r, 11-r)
			var pe *comm.PeerError
			// Whoever comes first to its deadline says it for both.
			reasons := map[int]string{7: "it has been called and has not dialled", 4: "connection refused"}
			if !errors.As(err, &pe) || !errors.Is(err, comm.ErrDeadline) ||
				!strings.Contains(err.Error(), reasons[pe.Rank]) ||
				reasons[pe.Rank] == "" {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	failed.Wait()
}

// A call of a rank that gives up returns once the other ranks know why: if its caller exits at once, they would
// blame this rank.
func TestCallsTellFirst(t *testing.T) {
	hosts, told := worldtest.SlowHosts(comm.Options{Deadline: 20 * time.Millisecond})
	err := hosts[0].Barrier(t.Context())
	if known := told(); !known || !errors.Is(err, comm.ErrDeadline) {
		t.Errorf("the call ended with %v; the other rank knows: %t", err, known)
	}
	for _, g := range hosts {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}
