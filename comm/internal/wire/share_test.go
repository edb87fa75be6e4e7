package wire

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// socketPair returns both ends of a connection within a node.
func socketPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
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
	s := speech{Plain, 1}
	var wg sync.WaitGroup
	var errs [2]error
	wg.Go(func() {
		accepted, errs[0] = pair[1].accept(b, s, func() {}, func(int, int) error { return nil })
	})
	dialed, errs[1] = pair[0].dial(a, s, pair[1].rank, 0, func() bool { return true })
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	return dialed, accepted
}

// talk makes a rank of two of a channel.
func talk(rank int, c *channel) *sockets {
	s := newSockets(rank, 2, "", defaultPairs)
	s.peer(1 - rank).reserve(0)
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

// TestShare sends messages of many sizes both ways through shared memory, several at once and more than it
// holds, and leaves no memory behind.
func TestShare(t *testing.T) {
	var log strings.Builder
	dialed, accepted := shared(t, pairOf(&log))
	if dialed.area == nil || accepted.area == nil || !accepted.placing || !strings.Contains(log.String(), "rank 0: shares memory with rank 1") {
		t.Fatalf("no memory is shared: %s", &log)
	}
	ends := [2]*sockets{talk(0, accepted), talk(1, dialed)}
	random := rand.New(rand.NewPCG(3, 4))
	sizes := []int{maxEager + 1, 0, maxPlaced - 1, maxPlaced, 9, maxPlaced + 1, 3 << 20, 40_000, 2<<20 + 5}
	var wg sync.WaitGroup
	for rank, s := range ends {
		var out, in [][]byte
		for _, n := range sizes {
			b := make([]byte, n)
			for i := range b {
				b[i] = byte(random.Uint32())
			}
			out, in = append(out, b), append(in, make([]byte, n))
		}
		wg.Go(func() { send(s, 1-rank, out) })
		wg.Go(func() {
			receive(ends[1-rank], rank, in)
			for i := range in {
				if !bytes.Equal(in[i], out[i]) {
					t.Errorf("message of %d bytes from rank %d came out differently", sizes[i], rank)
				}
			}
		})
	}
	wg.Wait()
	wg.Go(func() { ends[0].Close() })
	ends[1].Close()
	wg.Wait()
	for i := 0; mappings(t) > 0; i++ {
		if i > 1000 {
			t.Fatal("memory is left behind")
		}
		time.Sleep(time.Millisecond)
	}
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

// TestHostilePlaced has a rank that shares memory announce pieces in it that are none.
func TestHostilePlaced(t *testing.T) {
	for name, c := range map[string]struct {
		h    header
		text string
	}{
		"not accepted": {header{kind: framePlaced, id: link.MsgID{Seq: 5}}, "not accepted"},
		"ahead":        {header{kind: framePlaced, size: maxPlaced}, "a piece at 131072 of a message of 1048576 bytes, of which 0 have come"},
		"a small one":  {header{kind: framePlaced, id: link.MsgID{Seq: 1}}, "a piece at 0 of a message of 4 bytes"},
		"shares twice": {header{kind: frameShare}, "shares memory"},
	} {
		var log strings.Builder
		dialed, accepted := shared(t, pairOf(&log))
		s := talk(0, accepted)
		r := link.NewRound()
		r.Begin(2)
		var xs [2]link.Transfer
		for i, n := range []int{1 << 20, 4} {
			xs[i].Prepare(r, link.MsgID{Seq: uint64(i)}, 1, false, make([]byte, n))
			s.Post(&xs[i])
		}
		dialed.out.add(header{kind: frameShare}, nil)
		if err := dialed.out.flush(); err != nil {
			t.Fatal(err)
		}
		dialed.out.add(c.h, nil)
		if c.h.kind == framePlaced { // nothing is written into the ring
			dialed.out.(*plainWriter).placed = nil
		}
		if err := dialed.out.flush(); err != nil {
			t.Fatal(err)
		}
		<-r.Done()
		var pe *blame.PeerError
		if err := xs[0].Err(); !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, blame.ErrProtocol) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want rank 1 and %q", name, err, c.text)
		}
		dialed.Close()
		dialed.area.Close()
		dialed.area.Close()
		s.Close()
	}
}

// A rank that is gone with what it was sent unread resets the connection, for which the system's call says a
// negative count: the other has an error of it, and no panic.
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
