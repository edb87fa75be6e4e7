package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// A recorder is a connection that keeps its output.
type recorder struct {
	net.Conn
	bytes.Buffer
}

func (r *recorder) Read(b []byte) (int, error)  { return r.Buffer.Read(b) }
func (r *recorder) Write(b []byte) (int, error) { return r.Buffer.Write(b) }

// writerOf returns a writer of sealed frames.
func writerOf(t *testing.T, conn net.Conn) frameWriter {
	t.Helper()
	aead, err := newSeal(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	return &sealedWriter{conn: conn, aead: aead}
}

// readAll reads frames, and returns their payloads up to the first that is refused, and why.
func readAll(t *testing.T, raw []byte) (got []string, err error) {
	t.Helper()
	aead, err := newSeal(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	r := newOpeningReader(bytes.NewReader(raw), aead)
	for {
		h, err := r.next()
		if err != nil {
			return got, err
		}
		payload := make([]byte, h.length)
		if err := r.payload(payload); err != nil {
			return got, err
		}
		got = append(got, string(payload))
	}
}

// TestFramesAreTakenOnceInOrder records sealed frames and replays them in other orders. The reader fails at the first
// frame out of place, and at every changed bit.
func TestFramesAreTakenOnceInOrder(t *testing.T) {
	var frames [][]byte
	rec := &recorder{}
	w := writerOf(t, rec)
	for i, text := range []string{"data", "", "more"} {
		w.add(header{frameData, len(text), link.MsgID{Seq: uint64(i)}, uint64(len(text))}, []byte(text))
		if err := w.flush(); err != nil {
			t.Fatal(err)
		}
		frames = append(frames, bytes.Clone(rec.Bytes()))
		if bytes.Contains(rec.Bytes(), []byte("CPF")) || text != "" && bytes.Contains(rec.Bytes(), []byte(text)) {
			t.Errorf("frame %d is %x", i, rec.Bytes())
		}
		rec.Reset()
	}
	a, b, c := frames[0], frames[1], frames[2]
	for name, x := range map[string]struct {
		frames [][]byte
		good   int
		err    error
	}{
		"in order": {[][]byte{a, b, c}, 3, io.EOF}, "twice": {[][]byte{a, a}, 1, blame.ErrProtocol}, "left out": {[][]byte{a, c}, 1, blame.ErrProtocol},
		"swapped": {[][]byte{b, a}, 0, blame.ErrProtocol}, "cut": {[][]byte{a[:len(a)-1]}, 0, io.ErrUnexpectedEOF},
	} {
		if got, err := readAll(t, bytes.Join(x.frames, nil)); len(got) != x.good || !errors.Is(err, x.err) {
			t.Errorf("%s: %q and %v, want %d frames and %v", name, got, err, x.good, x.err)
		}
	}
	for bit := range 8 * len(a) {
		changed := bytes.Clone(a)
		changed[bit/8] ^= 1 << (bit % 8)
		if got, err := readAll(t, changed); len(got) > 0 || !errors.Is(err, blame.ErrProtocol) {
			t.Errorf("bit %d changed: %q and %v", bit, got, err)
		}
	}
}

// TestInjection puts bytes between the frames of a running job: the receiver fails with the peer's name and accepts
// none of them.
func TestInjection(t *testing.T) {
	here, there := net.Pipe()
	s := newSockets(0, 2, "", defaultPairs)
	c := plainChannel(here, 1, "pid 1")
	aead, err := newSeal(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	c.in = newOpeningReader(here, aead)
	s.peer(1).reserve()
	s.attach(c)
	go io.Copy(io.Discard, there)
	x, r := &link.Transfer{}, link.NewRound()
	r.Begin(1)
	x.Prepare(r, link.MsgID{}, 1, false, make([]byte, 4))
	s.Post(x)
	there.SetWriteDeadline(time.Now().Add(10 * time.Second))
	there.Write(append(frame(header{kind: frameData, length: 4, size: 4}, "evil"), make([]byte, 64)...))
	<-r.Done()
	if err := x.Err(); !errors.Is(err, blame.ErrProtocol) || string(x.Buf) != "\x00\x00\x00\x00" {
		t.Errorf("%v and %q", err, x.Buf)
	}
	there.Close()
	s.Close()
}
