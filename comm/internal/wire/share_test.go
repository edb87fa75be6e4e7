package wire

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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

// pairOf returns identities of a world of two, with a log.
func pairOf(log *strings.Builder) (dialerAndAcceptor [2]*identity) {
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(log, format+"\n", args...)
	}
	id := func(rank int) *identity {
		c := Config{Rank: rank, Size: 2, Secret: testSecret, Name: fmt.Sprint("pid ", rank), Log: say}
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

// deliver moves all messages from one rank of two to the other, at once, and reports whether they arrive as they were.
func deliver(from, to *sockets, messages ...[]byte) bool {
	var in [][]byte
	for _, m := range messages {
		in = append(in, make([]byte, len(m)))
	}
	_, sent := post(from, true, messages...)
	_, come := post(to, false, in...)
	<-sent.Done()
	<-come.Done()
	return slices.EqualFunc(messages, in, bytes.Equal)
}

// closeBoth ends both ranks of a world at once.
func closeBoth(ends [2]*sockets) {
	var wg sync.WaitGroup
	for _, s := range ends {
		wg.Go(func() { s.Close() })
	}
	wg.Wait()
}

// TestShareRefused lets one of two ranks share no memory: everything uses the socket.
func TestShareRefused(t *testing.T) {
	for name, alone := range map[string]int{"dialer": 0, "acceptor": 1} {
		var log strings.Builder
		pair := pairOf(&log)
		pair[alone].alone = true
		dialed, accepted := shared(t, pair)
		if accepted.area != nil || accepted.placing || dialed.placing {
			t.Errorf("%s: memory is shared", name)
		}
		ends := [2]*sockets{talk(accepted), talk(dialed)}
		if !deliver(ends[1], ends[0], bytes.Repeat([]byte("text"), 1<<18)) {
			t.Errorf("%s: a message came out differently", name)
		}
		closeBoth(ends)
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

// bothPipes returns both ends of pipes beside a connection, as if each side had heard that the other goes on there.
func bothPipes(t *testing.T) (a, b *pipes) {
	t.Helper()
	left, right := socketPair(t)
	a, theirs, err := makePipes(left)
	if err != nil {
		t.Fatal(err)
	}
	if b, err = newPipes(right, theirs[0], theirs[1]); err != nil {
		t.Fatal(err)
	}
	a.heard, b.heard = true, true
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// TestPipes sends more buffers than a pipe has room for, some of them empty, and ends it.
func TestPipes(t *testing.T) {
	a, b := bothPipes(t)
	var bufs net.Buffers
	for n := range 60 {
		bufs = append(bufs, bytes.Repeat([]byte{byte(n)}, n*n*11))
	}
	want := bytes.Join(bufs, nil)
	sent := make(chan error)
	go func() {
		sent <- errors.Join(a.send(bufs), a.CloseWrite())
	}()
	if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes came out, and %v, of %d", len(got), err, len(want))
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// TestPipesEnd ends the other side while written bytes are unread.
func TestPipesEnd(t *testing.T) {
	a, b := bothPipes(t)
	full := net.Buffers{make([]byte, 1<<20)}
	a.SetWriteDeadline(time.Now())
	if err := a.send(full); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a full pipe: %v", err)
	}
	b.Close()
	a.SetWriteDeadline(time.Time{})
	if err := a.send(net.Buffers{{1}}); !errors.Is(err, unix.EPIPE) {
		t.Errorf("a pipe that nobody reads: %v", err)
	}
	if n, err := a.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("a pipe that nobody writes: %d bytes, %v", n, err)
	}
}
