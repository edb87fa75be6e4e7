package comm_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// A world function makes a world with a rank for each compute stream. In worlds of more than pairs ranks each connects
// to few; 0: the default.
type world func(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group

var localWorld world = func(_ testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group {
	return comm.NewLocalFew(len(compute), pairs, compute, opts)
}

// worldOf makes worlds by the meshes that of returns for n ranks.
func worldOf(of func(t testing.TB, n int) func(rank int) comm.Mesh) world {
	return func(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group {
		n, key := len(compute), worldtest.Secret()
		mesh := of(t, n)
		return worldtest.Join(t, n, func(r int) (*comm.Group, error) {
			m := mesh(r)
			m.Rank, m.Size, m.Secret, m.RunID = r, n, key, t.Name()
			return comm.Connect(context.Background(), m.Few(pairs), compute[r], opts)
		})
	}
}

// unixWorldOf makes worlds of one node in which the given ranks share no memory.
func unixWorldOf(alone func(rank int) bool) world {
	return worldOf(func(t testing.TB, _ int) func(rank int) comm.Mesh {
		dir := worldtest.SocketDir(t)
		return func(r int) comm.Mesh { return comm.Mesh{Dir: dir, Alone: alone(r)} }
	})
}

var unixWorld = unixWorldOf(func(int) bool { return false })

// tcpWorldAt makes worlds over TCP at an address of this host.
func tcpWorldAt(host string) world {
	return worldOf(func(t testing.TB, n int) func(rank int) comm.Mesh {
		lns, addrs := listeners(t, host, n)
		return func(r int) comm.Mesh { return comm.Mesh{Listener: lns[r], Addrs: addrs} }
	})
}

var tcpWorld = tcpWorldAt("127.0.0.1")

// mixedWorld joins ranks of two nodes, the even and the odd ones, over Unix sockets within a node
// and TCP between the two.
var mixedWorld = worldOf(func(t testing.TB, n int) func(rank int) comm.Mesh {
	lns, addrs := listeners(t, "127.0.0.1", n)
	dirs := []string{worldtest.SocketDir(t), worldtest.SocketDir(t)}
	return func(r int) comm.Mesh {
		reach := make([]string, n)
		for p := (r + 1) % 2; p < n; p += 2 {
			reach[p] = addrs[p]
		}
		return comm.Mesh{Dir: dirs[r%2], Listener: lns[r], Addrs: reach}
	}
})

// listeners returns listeners of n ranks at an address of this host, and their addresses.
func listeners(t testing.TB, host string, n int) (lns []net.Listener, addrs []string) {
	for range n {
		ln, err := comm.Listen(context.Background(), host)
		if err != nil {
			t.Fatal(err)
		}
		lns, addrs = append(lns, ln), append(addrs, ln.Addr().String())
	}
	return lns, addrs
}

// suite runs the conformance suite.
func (w world) suite(t *testing.T, pairs int) {
	commtest.TestCommunicator(t, func(t *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		cs := make([]comm.Communicator, len(compute))
		for i, g := range w(t, pairs, compute, opts) {
			cs[i] = g
		}
		return cs
	})
}

func TestLocal(t *testing.T) { localWorld.suite(t, 0) }
func TestMixed(t *testing.T) { mixedWorld.suite(t, 0) }
func TestUnix(t *testing.T)  { unixWorld.suite(t, 0) }
func TestTCP(t *testing.T)   { tcpWorld.suite(t, 0) }

// TestSocketsAlone runs the suite over sockets without shared memory, and with some ranks that share memory, so that
// the dialer, the acceptor or both ends of a connection have none.
func TestSocketsAlone(t *testing.T) { unixWorldOf(func(int) bool { return true }).suite(t, 0) }
func TestMixedAlone(t *testing.T)   { unixWorldOf(func(r int) bool { return r%2 == 1 }).suite(t, 0) }

// The same with connections to neighbours alone at the start, to others on first use, and collectives
// over few neighbours. From 6 ranks on not all are neighbours.
func TestFewLocal(t *testing.T) { localWorld.suite(t, 1) }
func TestFewMixed(t *testing.T) { mixedWorld.suite(t, 1) }
func TestFewUnix(t *testing.T)  { unixWorld.suite(t, 1) }
func TestFewTCP(t *testing.T)   { tcpWorld.suite(t, 1) }

// everyone runs f for all groups at once.
func everyone(t testing.TB, groups []*comm.Group, f func(g *comm.Group) error) {
	t.Helper()
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() {
			if err := f(g); err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
		})
	}
	wg.Wait()
}

func closeAll(groups []*comm.Group) {
	var wg sync.WaitGroup
	for _, g := range groups {
		if g != nil {
			wg.Go(func() { g.Close() })
		}
	}
	wg.Wait()
}

// with returns a message to or from a rank.
func with(peer int, v tensor.View) []comm.Message { return []comm.Message{{Peer: peer, View: v}} }

// sum reduces a number over the groups and checks the result.
func sum(t *testing.T, groups []*comm.Group) {
	t.Helper()
	everyone(t, groups, func(g *comm.Group) error {
		v, n := tensor.FromSlice([]float32{float32(g.Rank() + 1)}, 1), g.Size()
		err := comm.Finish(t.Context())(g.AllReduce(v, comm.Sum))
		if got := tensor.Data[float32](v)[0]; err == nil && got != float32(n*(n+1)/2) {
			err = fmt.Errorf("sum %v", got)
		}
		return err
	})
}

// swap exchanges a number with two ranks and checks the received one.
func swap(ctx context.Context, g *comm.Group, to, from int) error {
	out, in := tensor.FromSlice([]int32{int32(g.Rank())}, 1), tensor.New(tensor.I32, 1)
	if err := comm.Finish(ctx)(g.Exchange(with(to, out), with(from, in))); err != nil {
		return err
	}
	if got := tensor.Data[int32](in)[0]; int(got) != from {
		return fmt.Errorf("rank %d sent %d", from, got)
	}
	return nil
}

// swapAt swaps with the rank at that distance, and the one at that distance on the other side.
func swapAt(ctx context.Context, g *comm.Group, distance int) error {
	n := g.Size()
	return swap(ctx, g, (g.Rank()+distance)%n, (g.Rank()+n-distance)%n)
}

// blames returns nil if err blames a rank for a cause, and otherwise an error.
func blames(err error, rank int, cause error) error {
	var pe *comm.PeerError
	if !errors.As(err, &pe) || pe.Rank != rank || !errors.Is(err, cause) {
		return fmt.Errorf("%w, want rank %d and %q", err, rank, cause)
	}
	return nil
}

// logs collects a mesh's lines about refused connections.
type logs struct {
	mu    sync.Mutex
	lines []string
}

func (l *logs) add(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// sees reports whether a line is logged within half a minute, and returns as soon as it is.
func (l *logs) sees(line string) bool {
	for range 3000 {
		if strings.Contains(l.String(), line) {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// wait returns when a line has been logged.
func (l *logs) wait(t *testing.T, line string) {
	t.Helper()
	if !l.sees(line) {
		t.Fatalf("%q was not logged:\n%s", line, l)
	}
}

// until returns a context that expires when a line is logged. A test that waits longer than that waits for a missing
// peer, however slow the machine is.
func (l *logs) until(t *testing.T, line string) context.Context {
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		l.sees(line)
		cancel(context.DeadlineExceeded)
	}()
	return ctx
}
