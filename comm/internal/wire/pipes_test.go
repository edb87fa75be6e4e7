package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

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
	if err := a.send(net.Buffers{{1}}); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("a pipe that nobody reads: %v", err)
	}
	if n, err := a.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("a pipe that nobody writes: %d bytes, %v", n, err)
	}
}
