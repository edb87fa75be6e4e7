package wire

import (
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// frame encodes a header and its payload.
func frame(h header, payload string) []byte {
	b := make([]byte, headerSize)
	h.encode(b)
	return append(b, payload...)
}

// plainChannel returns the connection with a rank.
func plainChannel(conn net.Conn, rank int, name string) *channel {
	return &channel{Conn: conn, rank: rank, name: name, in: newPlainReader(conn), out: &plainWriter{conn: conn}}
}

// against sends raw bytes to rank 0 of two from an authenticated rank 1, with receives of the given sizes posted as
// messages 0, 1, and so on. It returns the failure.
func against(t testing.TB, raw []byte, sizes ...int) error {
	t.Helper()
	s := newSockets(0, 2, "", defaultPairs)
	here, there := net.Pipe()
	s.peer(1).reserve()
	s.attach(plainChannel(here, 1, "pid 1"))
	<-s.complete
	r := link.NewRound()
	r.Begin(len(sizes))
	xs := make([]link.Transfer, len(sizes))
	for i, n := range sizes {
		xs[i].Prepare(r, link.MsgID{Seq: uint64(i)}, 1, false, make([]byte, n))
		s.Post(&xs[i])
	}
	go func() { // rank 1 drops its input
		var b [1024]byte
		for {
			if _, err := there.Read(b[:]); err != nil {
				return
			}
		}
	}()
	there.SetWriteDeadline(time.Now().Add(10 * time.Second))
	there.Write(raw) // it is cut short by the failure
	there.Close()
	<-r.Done()
	s.AwaitNotified()
	s.Close()
	failed := 0
	for i := range xs {
		if err := xs[i].Err(); err != nil && s.Err() != nil {
			if failed++; err.Error() != s.Err().Error() {
				t.Errorf("a transfer ended with %v, the transport with %v", err, s.Err())
			}
		}
	}
	if failed == 0 {
		return nil
	}
	return s.Err()
}

// TestHostilePeer makes a rank with the secret send invalid frames. The error names it, and memory stays within the
// bounds.
func TestHostilePeer(t *testing.T) {
	flood := func(h header, payload string, n int) (b []byte) {
		for i := range n {
			h.id.Seq = uint64(10 + i)
			b = append(b, frame(h, payload)...)
		}
		return b
	}
	spread := func(h header, payload string, groups, each int) (b []byte) {
		for g := range groups {
			h.id.Group = uint64(1 + g)
			b = append(b, flood(h, payload, each)...)
		}
		return b
	}
	small := strings.Repeat("x", maxEager)
	for name, c := range map[string]struct {
		raw  []byte
		want error
		text string
	}{
		"garbage":          {[]byte(strings.Repeat("garbage ", 10)), blame.ErrProtocol, "no frame header"},
		"unknown type":     {frame(header{kind: 99}, ""), blame.ErrProtocol, "type 99"},
		"huge payload":     {frame(header{kind: frameData, length: 1 << 30, size: 1 << 30}, ""), blame.ErrProtocol, "payload of 1073741824"},
		"not accepted":     {frame(header{kind: framePiece, length: 4, id: link.MsgID{Group: 0, Seq: 5}}, "data"), blame.ErrProtocol, "not accepted"},
		"unknown group":    {frame(header{kind: framePiece, length: 4, id: link.MsgID{Group: 9, Seq: 5}}, "data"), blame.ErrProtocol, "not accepted"},
		"piece of a small": {frame(header{kind: framePiece, length: 4}, "data"), blame.ErrProtocol, "message of 4"},
		"another size":     {frame(header{kind: frameData, length: 5, size: 5}, "datas"), blame.ErrMismatch, "it sends 5"},
		"offer to a small": {frame(header{kind: frameOffer, size: 1 << 20}, ""), blame.ErrMismatch, "it sends 1048576"},
		"window":           {flood(header{kind: frameData, length: maxEager, size: maxEager}, small, 9), blame.ErrProtocol, "window"},
		"empty messages":   {flood(header{kind: frameData}, "", eagerWindow/headerSize+1), blame.ErrProtocol, "window"},
		"unknown groups":   {spread(header{kind: frameOffer, size: 1 << 20}, "", maxUnknown+1, 1), blame.ErrProtocol, "1024"},
		"announcements":    {flood(header{kind: frameAccept, size: 1 << 20}, "", maxNotes+1), blame.ErrProtocol, "65536 messages"},
		"all groups":       {spread(header{kind: frameData, length: maxEager, size: maxEager}, small, 147, 7), blame.ErrProtocol, "16 MiB"},
		"twice":            {append(frame(header{kind: frameData, id: link.MsgID{Group: 0, Seq: 5}}, ""), frame(header{kind: frameData, id: link.MsgID{Group: 0, Seq: 5}}, "")...), blame.ErrProtocol, "twice"},
		"credit":           {frame(header{kind: frameCredit, size: 1}, ""), blame.ErrProtocol, "credit"},
		"wait":             {frame(header{kind: frameStatus, id: link.MsgID{Group: 1, Seq: 1}, size: 9}, ""), blame.ErrProtocol, "rank 8 of 2"},
		"nothing shared":   {frame(header{kind: frameShare}, ""), blame.ErrProtocol, "that it was not given"},
		"malformed abort":  {frame(header{kind: frameAbort, length: 3}, "abc"), blame.ErrProtocol, "malformed"},
		"goodbye":          {frame(header{kind: frameGoodbye}, ""), blame.ErrPeerLeft, "receive of 4 bytes"},
	} {
		err := against(t, c.raw, 4)
		var pe *blame.PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) ||
			!strings.Contains(err.Error(), "rank 1 (pid 1)") {
			t.Errorf("%s: %v, want rank 1, %v and %q", name, err, c.want, c.text)
		}
	}
}

// TestHostilePieces has a rank send pieces of an accepted message that are none: outside of it, of another
// length, twice, or of a message of its own.
func TestHostilePieces(t *testing.T) {
	const size = 2*maxPayload + 9
	whole := strings.Repeat("x", maxPayload)
	piece := func(at uint64, payload string) []byte {
		return frame(header{kind: framePiece, length: len(payload), size: at}, payload)
	}
	for name, c := range map[string]struct {
		raw  []byte
		text string
	}{
		"beyond":       {piece(3*maxPayload, "x"), "at 786432 of a message of 524297"},
		"short":        {piece(0, whole[1:]), "of 262143 bytes"},
		"too long":     {slices.Concat(piece(0, whole), piece(maxPayload, whole), piece(2*maxPayload, whole)), "of 262144 bytes"},
		"twice":        {append(piece(0, whole), piece(0, whole)...), "of which 262144 have come"},
		"out of turn":  {piece(maxPayload, whole), "of which 0 have come"},
		"not shared":   {frame(header{kind: framePlaced}, ""), "memory that is not shared"},
		"eager":        {frame(header{kind: frameData, length: 1, size: 1}, "x"), "it sends 1"},
		"after a mess": {append(piece(0, whole), "garbage garbage garbage garbage "...), "no frame header"},
	} {
		err := against(t, c.raw, size)
		var pe *blame.PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want rank 1 and %q", name, err, c.text)
		}
	}
}

// TestEndOfOneThatHasLeft ends a connection without a goodbye after others have reported that the rank has left. That
// is no failure.
func TestEndOfOneThatHasLeft(t *testing.T) {
	s := newSockets(0, 9, "", 1)
	var there [3]net.Conn
	for _, r := range []int{1, 2} {
		var here net.Conn
		here, there[r] = net.Pipe()
		s.peer(r).reserve()
		s.attach(plainChannel(here, r, ""))
		go io.Copy(io.Discard, there[r])
	}
	there[1].Write(
		frame(header{kind: frameStatus, length: 5, size: leftMark, id: link.MsgID{Group: 2, Seq: lastWord}}, "pid 2"),
	)
	for !s.roster.hasLeft(2) {
		time.Sleep(time.Millisecond)
	}
	if s.HasLeft(2) {
		t.Error("a rank counts as gone ahead of its own word")
	}
	there[2].Close()
	for !s.HasLeft(2) && s.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if err := s.Err(); err != nil {
		t.Errorf("the world has failed: %v", err)
	}
	s.Close()
	there[1].Close()
}

// unread sends n messages of that many bytes without receives, and returns the bytes that this rank allocates for each.
func unread(t *testing.T, n, bytes int) int {
	var before, after runtime.MemStats
	s := newSockets(0, 2, "", defaultPairs)
	p := s.peer(1)
	in := newPlainReader(strings.NewReader(strings.Repeat("x", n*bytes)))
	runtime.ReadMemStats(&before)
	for i := range n {
		if err := p.onData(in, header{kind: frameData, length: bytes, size: uint64(bytes), id: link.MsgID{Seq: uint64(i)}}); err != nil {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&after)
	s.Forget(0)
	if p.debts != (debts{}) {
		t.Errorf("of a group that is closed %+v is left", p.debts)
	}
	return int(after.TotalAlloc-before.TotalAlloc) / n
}

// TestSmallMessagesTakeLittle checks that early messages take about as much memory as their size, down to empty ones.
func TestSmallMessagesTakeLittle(t *testing.T) {
	for _, bytes := range []int{0, 1, 100, 1000} {
		n := eagerWindow / cost(bytes)
		if each := unread(t, n, bytes); each > 2*bytes+600 {
			t.Errorf("a message of %d bytes takes %d", bytes, each)
		}
	}
}

// FuzzPeer sends any bytes after the handshake. The error names the rank or its end, and memory stays within the
// bounds.
func FuzzPeer(f *testing.F) {
	f.Add(frame(header{kind: frameData, length: 4, size: 4}, "data"))
	f.Add(
		append(
			frame(header{kind: frameOffer, size: 1 << 20, id: link.MsgID{Group: 3}}, ""),
			frame(header{kind: frameGoodbye}, "")...),
	)
	f.Add(frame(header{kind: frameStatus, length: 5, size: 1, id: link.MsgID{Group: 1, Seq: 9}}, "pid 7"))
	f.Add(frame(header{kind: frameStatus, size: leftMark, id: link.MsgID{Group: 1, Seq: lastWord}}, ""))
	f.Add(frame(header{kind: frameCall, size: callDown, id: link.MsgID{Group: 0, Seq: 1}}, ""))
	f.Add(frame(header{kind: frameCredit, size: 64, id: link.MsgID{Group: 5}}, ""))
	note := encodeNote(&blame.PeerError{Rank: 1, Name: "rank 1", Cause: blame.ErrAborted})
	f.Add(frame(header{kind: frameAbort, length: len(note)}, string(note)))
	f.Add(
		append(
			frame(
				header{kind: framePiece, length: maxPayload, id: link.MsgID{Seq: 1}},
				strings.Repeat("x", maxPayload),
			),
			frame(header{kind: framePiece, length: 9, size: maxPayload, id: link.MsgID{Seq: 1}}, "last part")...),
	)
	f.Fuzz(func(t *testing.T, raw []byte) {
		err := against(t, raw, 4, maxPayload+9)
		var pe *blame.PeerError
		if err != nil && !errors.As(err, &pe) {
			t.Fatalf("the peer's fault became %v", err)
		}
	})
}
