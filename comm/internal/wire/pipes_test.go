package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/shm"
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

// TestPipesEnd has the other side die, and nobody read what is written.
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

// TestShareOfOthers sends descriptors with the ready frame that are not those of a memory and two pipes, such as
// one of a file that could be cut off.
func TestShareOfOthers(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, c := range map[string]struct {
		pick func(memory *os.File, pipes []*os.File) []*os.File
		text string
	}{
		"memory alone": {func(m *os.File, _ []*os.File) []*os.File { return []*os.File{m} }, "1 descriptors, not 3"},
		"no pipes":     {func(m *os.File, _ []*os.File) []*os.File { return []*os.File{m, m, m} }, "where a pipe was to be"},
		"no memory":    {func(_ *os.File, p []*os.File) []*os.File { return []*os.File{p[0], p[0], p[1]} }, "seals of the memory"},
		"a file":       {func(_ *os.File, p []*os.File) []*os.File { return []*os.File{file, p[0], p[1]} }, "seals of the memory"},
	} {
		var log strings.Builder
		id := pairOf(&log)[1]
		a, b := socketPair(t)
		area, memory, err := shm.New()
		if err != nil {
			t.Fatal(err)
		}
		own, theirs, err := makePipes(a)
		if err != nil {
			t.Fatal(err)
		}
		rights, err := rightsTo(c.pick(memory, theirs))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := a.WriteMsgUnix(frame(header{kind: frameReady}, ""), rights, nil); err != nil {
			t.Fatal(err)
		}
		ch := &channel{Conn: b, rank: 1, in: newPlainReader(b), out: &plainWriter{conn: b}}
		if err := id.awaitReady(ch); err != nil || ch.area != nil || ch.placing || ch.pipes != nil {
			t.Errorf("%s: taken, or the rank refused: %v", name, err)
		}
		if !strings.Contains(log.String(), c.text) {
			t.Errorf("%s: the log says %q", name, &log)
		}
		closeAll(append(theirs, memory)...)
		own.Close()
		b.Close()
		area.Close()
	}
}
