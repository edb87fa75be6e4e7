package comm_test

import (
	"context"
	"net"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/tensor"
)

// listeners returns TCP listeners of n ranks on the loopback interface, and their addresses.
func listeners(t testing.TB, n int) (lns []net.Listener, addrs []string) {
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		lns, addrs = append(lns, ln), append(addrs, ln.Addr().String())
	}
	return lns, addrs
}

// A world function makes a world with a rank for each compute stream. In worlds of more than pairs ranks each connects
// to few; 0: the default.
type world func(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group

func unixWorld(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group {
	return unixWorldOf(func(int) bool { return false })(t, pairs, compute, opts)
}

// unixWorldOf returns a function that makes worlds of one node in which the given ranks share no memory.
func unixWorldOf(alone func(rank int) bool) world {
	return func(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group {
		dir, key := worldtest.SocketDir(t), worldtest.Secret()
		return worldtest.Join(t, len(compute), func(r int) (*comm.Group, error) {
			m := comm.Mesh{Dir: dir, Rank: r, Size: len(compute), Secret: key, RunID: t.Name(), Alone: alone(r)}
			return comm.Connect(context.Background(), m.Few(pairs), compute[r], opts)
		})
	}
}

func tcpWorld(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group {
	lns, addrs := listeners(t, len(compute))
	key := worldtest.Secret()
	return worldtest.Join(t, len(compute), func(r int) (*comm.Group, error) {
		m := comm.Mesh{Listener: lns[r], Addrs: addrs, Rank: r, Size: len(compute), Secret: key}
		return comm.Connect(context.Background(), m.Few(pairs), compute[r], opts)
	})
}

// mixedWorld joins ranks of two nodes, the even and the odd ones, over Unix sockets within a node
// and TCP between the two.
func mixedWorld(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group {
	n := len(compute)
	lns, addrs := listeners(t, n)
	dirs, key := []string{worldtest.SocketDir(t), worldtest.SocketDir(t)}, worldtest.Secret()
	return worldtest.Join(t, n, func(r int) (*comm.Group, error) {
		reach := make([]string, n)
		for p := range n {
			if p%2 != r%2 {
				reach[p] = addrs[p]
			}
		}
		m := comm.Mesh{Rank: r, Size: n, Secret: key, RunID: t.Name(), Dir: dirs[r%2], Listener: lns[r], Addrs: reach}
		return comm.Connect(context.Background(), m.Few(pairs), compute[r], opts)
	})
}

// suite runs the conformance suite.
func (w world) suite(t *testing.T, pairs int) {
	commtest.TestCommunicator(t, func(t *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		return communicators(w(t, pairs, compute, opts))
	})
}

func TestMixed(t *testing.T) { world(mixedWorld).suite(t, 0) }
func TestUnix(t *testing.T)  { world(unixWorld).suite(t, 0) }
func TestTCP(t *testing.T)   { world(tcpWorld).suite(t, 0) }

// TestSocketsAlone runs the suite over sockets without shared memory, and with some ranks that share memory, so that
// the dialer, the acceptor or both ends of a connection have none.
func TestSocketsAlone(t *testing.T) { unixWorldOf(func(int) bool { return true }).suite(t, 0) }
func TestMixedAlone(t *testing.T) {
	unixWorldOf(func(r int) bool { return r%2 == 1 }).suite(t, 0)
}

// The same with connections to neighbours alone at the start, to others on first use, and collectives
// over few neighbours. From 6 ranks on not all are neighbours.
func TestFewMixed(t *testing.T) { world(mixedWorld).suite(t, 1) }
func TestFewUnix(t *testing.T)  { world(unixWorld).suite(t, 1) }
func TestFewTCP(t *testing.T)   { world(tcpWorld).suite(t, 1) }
