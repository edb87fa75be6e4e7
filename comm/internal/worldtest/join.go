// Package worldtest makes worlds of ranks for tests: in this process, over sockets, and of processes that a test ends.
package worldtest

import (
	"context"
	"crypto/rand"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/local"
	"github.com/cprun/cprun/tensor"
)

// Secret returns 32 random bytes.
func Secret() []byte {
	b := make([]byte, 32)
	rand.Read(b)
	return b
}

// SocketDir returns a private directory with a short path, which t removes. The path of t.TempDir can be too long for a
// socket.
func SocketDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "cp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Join makes a world of n ranks in this process, which connect at the same time.
func Join(t testing.TB, n int, connect func(r int) (*comm.Group, error)) []*comm.Group {
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

// JoinUnix makes a world over Unix sockets, with a rank for each compute stream.
func JoinUnix(t testing.TB, compute []tensor.Stream, opts comm.Options) []*comm.Group {
	dir, key := SocketDir(t), Secret()
	return Join(t, len(compute), func(r int) (*comm.Group, error) {
		return comm.Connect(context.Background(), comm.Mesh{Dir: dir, Rank: r, Size: len(compute), Secret: key,
			RunID: t.Name()}, compute[r], opts)
	})
}

// A slowNotifier is a transport that informs the other ranks of a failure with a delay.
type slowNotifier struct {
	link.Transport
	notified atomic.Bool
}

func (s *slowNotifier) AwaitNotified() {
	if s.Err() != nil {
		time.Sleep(50 * time.Millisecond)
		s.notified.Store(true)
	}
}

// SlowHosts returns the groups of two ranks of this process. The first informs the other of a failure with a delay, and
// notified reports whether it has. Callers of a group on top must not learn of the failure before that.
func SlowHosts(opts comm.Options) (hosts []*comm.Group, notified func() bool) {
	w := local.NewWorld(2)
	first := w.Link(0)
	slow := &slowNotifier{Transport: first.Transport}
	first.Transport = slow
	return []*comm.Group{comm.NewWorld(first, 0, nil, opts), comm.NewWorld(w.Link(1), 1, nil, opts)}, slow.notified.Load
}
