package comm

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"
)

// frame is a header and its payload on the wire.
func frame(h header, payload string) []byte {
	b := make([]byte, headerSize)
	h.encode(b)
	return append(b, payload...)
}

// against has rank 0 of two receive raw bytes from an authenticated rank 1, with a receive of
// 4 bytes posted as message 0, and returns the failure.
func against(t *testing.T, raw []byte) error {
	t.Helper()
	s := newSockets(0, 2, "")
	here, there := net.Pipe()
	s.reserve(1)
	s.attach(newPeer(s, 1, "pid 1", here, newPlainReader(here), &plainWriter{conn: here}))
	<-s.complete
	r := &round{done: make(chan struct{}, 1)}
	r.left.Store(1)
	x := &transfer{peer: 1, buf: make([]byte, 4), round: r}
	s.post(x)
	go func() { // rank 1 takes what it is sent
		var b [1024]byte
		for {
			if _, err := there.Read(b[:]); err != nil {
				return
			}
		}
	}()
	there.SetWriteDeadline(time.Now().Add(10 * time.Second))
	there.Write(raw) // it is cut short by the failure
	<-r.done
	s.flush()
	there.Close()
	s.close()
	if x.err == nil || s.err() == nil {
		return nil
	}
	if x.err.Error() != s.err().Error() {
		t.Errorf("the transfer ended with %v, the transport with %v", x.err, s.err())
	}
	return s.err()
}

// TestHostilePeer has a rank that has the secret send what no rank sends. It is named, and
// nothing is taken over or allocated beyond the bounds.
func TestHostilePeer(t *testing.T) {
	flood := func(h header, payload string, n int) (b []byte) {
		for i := range n {
			h.id.seq = uint64(10 + i)
			b = append(b, frame(h, payload)...)
		}
		return b
	}
	small := strings.Repeat("x", maxEager)
	for name, c := range map[string]struct {
		raw  []byte
		want error
		text string
	}{
		"garbage":          {[]byte(strings.Repeat("garbage ", 10)), ErrProtocol, "no frame header"},
		"unknown type":     {frame(header{kind: 99}, ""), ErrProtocol, "type 99"},
		"huge payload":     {frame(header{kind: frameData, length: 1 << 30, size: 1 << 30}, ""), ErrProtocol, "payload of 1073741824"},
		"not accepted":     {frame(header{kind: frameData, length: 4, size: 1 << 20, id: msgID{0, 5}}, "data"), ErrProtocol, "not accepted"},
		"another size":     {frame(header{kind: frameData, length: 5, size: 5}, "datas"), ErrMismatch, "it sends 5"},
		"offer to a small": {frame(header{kind: frameOffer, size: 1 << 20}, ""), ErrMismatch, "it sends 1048576"},
		"window":           {flood(header{kind: frameData, length: maxEager, size: maxEager}, small, 9), ErrProtocol, "window"},
		"empty messages":   {flood(header{kind: frameData}, "", eagerWindow/headerSize+1), ErrProtocol, "window"},
		"twice":            {append(frame(header{kind: frameData, id: msgID{0, 5}}, ""), frame(header{kind: frameData, id: msgID{0, 5}}, "")...), ErrProtocol, "twice"},
		"credit":           {frame(header{kind: frameCredit, size: 1}, ""), ErrProtocol, "credit"},
		"stand":            {frame(header{kind: frameStand, size: 9}, ""), ErrProtocol, "rank 8 of 2"},
		"malformed abort":  {frame(header{kind: frameAbort, length: 3}, "abc"), ErrProtocol, "malformed"},
		"goodbye":          {frame(header{kind: frameGoodbye}, ""), ErrPeerLeft, "receive of 4 bytes"},
	} {
		err := against(t, c.raw)
		var pe *PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "rank 1 (pid 1)") {
			t.Errorf("%s: %v, want rank 1, %v and %q", name, err, c.want, c.text)
		}
	}
}
