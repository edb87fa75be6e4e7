package comm_test

import (
	"context"
	"crypto/rand"
	"net"
	"os"
	"sync"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/internal/tensor"
)

func secret() []byte {
	b := make([]byte, 32)
	rand.Read(b)
	return b
}

// socketDir is a private directory with a short path; t.TempDir's can be too long.
func socketDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "cp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// connectAll makes a world of n ranks in this process.
func connectAll(t testing.TB, n int, connect func(r int) (*comm.Group, error)) []*comm.Group {
	groups := make([]*comm.Group, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			var err error
			if groups[r], err = connect(r); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return groups
}

func unixWorld(t *testing.T, compute []tensor.Stream, opts comm.Options) []*comm.Group {
	dir, key := socketDir(t), secret()
	return connectAll(t, len(compute), func(r int) (*comm.Group, error) {
		return comm.ConnectUnix(context.Background(), comm.Mesh{Dir: dir, Rank: r, Size: len(compute), Secret: key, RunID: t.Name()}, compute[r], opts)
	})
}

// listeners are the TCP sockets of n ranks on the loopback interface, and their addresses.
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

func tcpWorld(t *testing.T, compute []tensor.Stream, opts comm.Options) []*comm.Group {
	lns, addrs := listeners(t, len(compute))
	key := secret()
	return connectAll(t, len(compute), func(r int) (*comm.Group, error) {
		return comm.ConnectTCP(context.Background(), comm.Mesh{Listener: lns[r], Addrs: addrs, Rank: r, Size: len(compute), Secret: key}, compute[r], opts)
	})
}

func TestUnix(t *testing.T) {
	commtest.TestCommunicator(t, func(t *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		return communicators(unixWorld(t, compute, opts))
	})
}

func TestTCP(t *testing.T) {
	commtest.TestCommunicator(t, func(t *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		return communicators(tcpWorld(t, compute, opts))
	})
}
