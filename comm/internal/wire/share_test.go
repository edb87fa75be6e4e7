package wire

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm/internal/link"
)

// socketPair returns both ends of a connection within a node.
func socketPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		conn, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = conn.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// shared runs a handshake within a node, and returns both channels.
func shared(t *testing.T, pair [2]*identity) (dialed, accepted *channel) {
	t.Helper()
	a, b := socketPair(t)
	var wg sync.WaitGroup
	var errs [2]error
	wg.Go(func() {
		accepted, errs[0] = pair[1].accept(b, Plain, func() {}, func(int) error { return nil })
	})
	dialed, errs[1] = pair[0].dial(a, Plain, pair[1].rank, func() bool { return true })
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	return dialed, accepted
}

// talk makes a rank of two of a channel.
func talk(rank int, c *channel) *sockets {
	s := newSockets(rank, 2, "", defaultPairs)
	s.peer(1 - rank).reserve()
	s.attach(c)
	return s
}

// pairOf returns identities of a world of two, with a log.
func pairOf(log *strings.Builder) (dialerAndAcceptor [2]*identity) {
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(log, format+"\n", args...)
	}
	id := func(rank int) *identity {
		c := Config{Rank: rank, Size: 2, Secret: []byte("0123456789abcdef"), Name: fmt.Sprint("pid ", rank), Log: say}
		return c.identity()
	}
	return [2]*identity{id(1), id(0)}
}

// mappings counts the memories that this process shares.
func mappings(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte("memfd:cprun-exchange"))
}

func send(s *sockets, peer int, all [][]byte)    { transfers(s, peer, true, all) }
func receive(s *sockets, peer int, all [][]byte) { transfers(s, peer, false, all) }

// transfers moves all messages with a peer at once, in one direction.
func transfers(s *sockets, peer int, out bool, all [][]byte) {
	r := link.NewRound()
	r.Begin(len(all))
	xs := make([]link.Transfer, len(all))
	for i, b := range all {
		xs[i].Prepare(r, link.MsgID{Seq: uint64(i)}, peer, out, b)
		s.Post(&xs[i])
	}
	<-r.Done()
}

// TestShareRefused has one of two ranks share no memory: all goes over the socket.
func TestShareRefused(t *testing.T) {
	for name, change := range map[string]func(dialer, acceptor *identity){
		"dialer":   func(d, _ *identity) { d.alone = true },
		"acceptor": func(_, a *identity) { a.alone = true },
	} {
		var log strings.Builder
		pair := pairOf(&log)
		change(pair[0], pair[1])
		dialed, accepted := shared(t, pair)
		if accepted.area != nil || accepted.placing || dialed.placing {
			t.Errorf("%s: memory is shared", name)
		}
		ends := [2]*sockets{talk(0, accepted), talk(1, dialed)}
		want, got := [][]byte{bytes.Repeat([]byte("text"), 1<<18)}, [][]byte{make([]byte, 1<<20)}
		var wg sync.WaitGroup
		wg.Go(func() { send(ends[1], 0, want) })
		receive(ends[0], 1, got)
		wg.Wait()
		if !bytes.Equal(want[0], got[0]) {
			t.Errorf("%s: a message came out differently", name)
		}
		wg.Go(func() { ends[0].Close() })
		ends[1].Close()
		wg.Wait()
	}
}

// TestResetBeforeReady ends a rank with unread input, which resets the connection. The system call then returns a
// negative count: an error on the other side, and no panic.
func TestResetBeforeReady(t *testing.T) {
	a, b := socketPair(t)
	defer a.Close()
	if _, err := a.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	b.Close()
	if _, err := newPlainReader(&rights{UnixConn: a}).next(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%v, want %v", err, unix.ECONNRESET)
	}
}
