package wire

import (
	"errors"
	"io"
	"math/bits"
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

// join gives a rank a connection.
func join(s *sockets, c *channel) *sockets {
	s.peer(c.rank).reserve()
	s.attach(c)
	return s
}

// talk makes a rank of two of a channel.
func talk(c *channel) *sockets { return join(newSockets(1-c.rank, 2, "", defaultPairs), c) }

// post begins messages with the other rank of two, numbered from 0, and returns their round.
func post(s *sockets, send bool, bufs ...[]byte) ([]link.Transfer, *link.Round) {
	r, xs := link.NewRound(), make([]link.Transfer, len(bufs))
	r.Begin(len(xs))
	for i, b := range bufs {
		xs[i].Prepare(r, link.MsgID{Seq: uint64(i)}, 1-s.rank, send, b)
		s.Post(&xs[i])
	}
	return xs, r
}

// against sends raw bytes to rank 0 of two from an authenticated rank 1, with receives of the given sizes posted as
// messages 0, 1, and so on. It returns the failure.
func against(t testing.TB, raw []byte, sizes ...int) error {
	t.Helper()
	here, there := net.Pipe()
	s := talk(plainChannel(here, 1, "pid 1"))
	<-s.complete
	var bufs [][]byte
	for _, n := range sizes {
		bufs = append(bufs, make([]byte, n))
	}
	xs, r := post(s, false, bufs...)
	go io.Copy(io.Discard, there) // rank 1 drops its input
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
	small, whole := strings.Repeat("x", maxEager), strings.Repeat("x", maxPayload)
	piece := func(at uint64, payload string) []byte {
		return frame(header{kind: framePiece, length: len(payload), size: at}, payload)
	}
	const large = 2*maxPayload + 9
	for name, c := range map[string]struct {
		size int // of the message that rank 0 waits for
		raw  []byte
		want error
		text string
	}{
		"garbage":          {4, []byte(strings.Repeat("garbage ", 10)), blame.ErrProtocol, "no frame header"},
		"unknown type":     {4, frame(header{kind: 99}, ""), blame.ErrProtocol, "type 99"},
		"huge payload":     {4, frame(header{kind: frameData, length: 1 << 30, size: 1 << 30}, ""), blame.ErrProtocol, "payload of 1073741824"},
		"not accepted":     {4, frame(header{kind: framePiece, length: 4, id: link.MsgID{Group: 0, Seq: 5}}, "data"), blame.ErrProtocol, "not accepted"},
		"unknown group":    {4, frame(header{kind: framePiece, length: 4, id: link.MsgID{Group: 9, Seq: 5}}, "data"), blame.ErrProtocol, "not accepted"},
		"piece of a small": {4, frame(header{kind: framePiece, length: 4}, "data"), blame.ErrProtocol, "message of 4"},
		"another size":     {4, frame(header{kind: frameData, length: 5, size: 5}, "datas"), blame.ErrMismatch, "it sends 5"},
		"offer to a small": {4, frame(header{kind: frameOffer, size: 1 << 20}, ""), blame.ErrMismatch, "it sends 1048576"},
		"window":           {4, flood(header{kind: frameData, length: maxEager, size: maxEager}, small, 9), blame.ErrProtocol, "window"},
		"empty messages":   {4, flood(header{kind: frameData}, "", eagerWindow/headerSize+1), blame.ErrProtocol, "window"},
		"unknown groups":   {4, spread(header{kind: frameOffer, size: 1 << 20}, "", maxUnknown+1, 1), blame.ErrProtocol, "1024"},
		"announcements":    {4, flood(header{kind: frameAccept, size: 1 << 20}, "", maxNotes+1), blame.ErrProtocol, "65536 messages"},
		"all groups":       {4, spread(header{kind: frameData, length: maxEager, size: maxEager}, small, 147, 7), blame.ErrProtocol, "16 MiB"},
		"twice":            {4, append(frame(header{kind: frameData, id: link.MsgID{Group: 0, Seq: 5}}, ""), frame(header{kind: frameData, id: link.MsgID{Group: 0, Seq: 5}}, "")...), blame.ErrProtocol, "twice"},
		"credit":           {4, frame(header{kind: frameCredit, size: 1}, ""), blame.ErrProtocol, "credit"},
		"wait":             {4, frame(header{kind: frameStatus, id: link.MsgID{Group: 1, Seq: 1}, size: 9}, ""), blame.ErrProtocol, "rank 8 of 2"},
		"nothing shared":   {4, frame(header{kind: frameShare}, ""), blame.ErrProtocol, "that it was not given"},
		"malformed abort":  {4, frame(header{kind: frameAbort, length: 3}, "abc"), blame.ErrProtocol, "malformed"},
		"goodbye":          {4, frame(header{kind: frameGoodbye}, ""), blame.ErrPeerLeft, "receive of 4 bytes"},
		// Pieces of an accepted message: outside of it, of another length, twice, or of another message.
		"piece beyond": {large, piece(3*maxPayload, "x"), blame.ErrProtocol, "at 786432 of a message of 524297"},
		"short":        {large, piece(0, whole[1:]), blame.ErrProtocol, "of 262143 bytes"},
		"too long":     {large, slices.Concat(piece(0, whole), piece(maxPayload, whole), piece(2*maxPayload, whole)), blame.ErrProtocol, "of 262144 bytes"},
		"piece twice":  {large, append(piece(0, whole), piece(0, whole)...), blame.ErrProtocol, "of which 262144 have come"},
		"out of turn":  {large, piece(maxPayload, whole), blame.ErrProtocol, "of which 0 have come"},
		"not shared":   {large, frame(header{kind: framePlaced}, ""), blame.ErrProtocol, "memory that is not shared"},
		"eager":        {large, frame(header{kind: frameData, length: 1, size: 1}, "x"), blame.ErrMismatch, "it sends 1"},
		"after a mess": {large, append(piece(0, whole), "garbage garbage garbage garbage "...), blame.ErrProtocol, "no frame header"},
	} {
		err := against(t, c.raw, c.size)
		var pe *blame.PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) ||
			!strings.Contains(err.Error(), "rank 1 (pid 1)") {
			t.Errorf("%s: %v, want rank 1, %v and %q", name, err, c.want, c.text)
		}
	}
}

// TestInjection puts bytes between the frames of a running job: the receiver fails with the peer's name and accepts
// none of them.
func TestInjection(t *testing.T) {
	here, there := net.Pipe()
	c := plainChannel(here, 1, "pid 1")
	c.in = newOpeningReader(here, testSeal(t))
	s := talk(c)
	go io.Copy(io.Discard, there)
	xs, r := post(s, false, make([]byte, 4))
	there.SetWriteDeadline(time.Now().Add(10 * time.Second))
	there.Write(append(frame(header{kind: frameData, length: 4, size: 4}, "evil"), make([]byte, 64)...))
	<-r.Done()
	if err := xs[0].Err(); !errors.Is(err, blame.ErrProtocol) || string(xs[0].Buf) != "\x00\x00\x00\x00" {
		t.Errorf("%v and %q", err, xs[0].Buf)
	}
	there.Close()
	s.Close()
}

// TestEndOfOneThatHasLeft ends a connection without a goodbye after others have reported that the rank has left. That
// is no failure.
func TestEndOfOneThatHasLeft(t *testing.T) {
	s := newSockets(0, 9, "", 1)
	var there [3]net.Conn
	for _, r := range []int{1, 2} {
		var here net.Conn
		here, there[r] = net.Pipe()
		join(s, plainChannel(here, r, ""))
		go io.Copy(io.Discard, there[r])
	}
	gone := header{kind: frameStatus, length: 5, size: leftMark, id: link.MsgID{Group: 2, Seq: lastWord}}
	there[1].Write(frame(gone, "pid 2"))
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
		h := header{kind: frameData, length: bytes, size: uint64(bytes), id: link.MsgID{Seq: uint64(i)}}
		if err := p.onData(in, h); err != nil {
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
	offer := frame(header{kind: frameOffer, size: 1 << 20, id: link.MsgID{Group: 3}}, "")
	whole := header{kind: framePiece, length: maxPayload, id: link.MsgID{Seq: 1}}
	rest := header{kind: framePiece, length: 9, size: maxPayload, id: link.MsgID{Seq: 1}}
	note := encodeNote(&blame.PeerError{Rank: 1, Name: "rank 1", Cause: blame.ErrAborted})
	for _, raw := range [][]byte{
		frame(header{kind: frameData, length: 4, size: 4}, "data"),
		append(offer, frame(header{kind: frameGoodbye}, "")...),
		frame(header{kind: frameStatus, length: 5, size: 1, id: link.MsgID{Group: 1, Seq: 9}}, "pid 7"),
		frame(header{kind: frameStatus, size: leftMark, id: link.MsgID{Group: 1, Seq: lastWord}}, ""),
		frame(header{kind: frameCall, size: callDown, id: link.MsgID{Group: 0, Seq: 1}}, ""),
		frame(header{kind: frameCredit, size: 64, id: link.MsgID{Group: 5}}, ""),
		frame(header{kind: frameAbort, length: len(note)}, string(note)),
		append(frame(whole, strings.Repeat("x", maxPayload)), frame(rest, "last part")...),
	} {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		err := against(t, raw, 4, maxPayload+9)
		var pe *blame.PeerError
		if err != nil && !errors.As(err, &pe) {
			t.Fatalf("the peer's fault became %v", err)
		}
	})
}

// step returns the rank to which a rank of n, connected only to its neighbours, passes a call; -1: none. Its output is
// dropped.
func step(t *testing.T, rank, n int, h header) int {
	t.Helper()
	s := newSockets(rank, n, "", 1)
	for _, r := range s.near {
		s.peer(r).met.Store(true)
	}
	s.pass(h)
	next := -1
	for _, r := range s.near {
		if p := s.peer(r); len(p.ctrl) > 0 {
			if next >= 0 || p.ctrl[0] != h {
				t.Fatalf("rank %d passes %+v on to %d and %d", rank, h, next, r)
			}
			next = r
		}
	}
	return next
}

// TestCallsArrive follows calls both ways, in worlds of many sizes: they arrive within log2 N steps, and
// no rank is on both ways.
func TestCallsArrive(t *testing.T) {
	for _, n := range []int{3, 6, 9, 17, 32, 61} {
		for to := 1; to < n; to++ {
			seen := map[int]bool{}
			for way := uint64(callUp); way <= callDown; way++ {
				h := header{kind: frameCall, id: link.MsgID{Group: 0, Seq: uint64(to)}, size: way}
				at, steps := 0, 0
				for at != to {
					if at = step(t, at, n, h); at < 0 {
						t.Fatalf("a call from 0 to %d of %d is lost", to, n)
					}
					if at != to && seen[at] {
						t.Errorf("both calls from 0 to %d of %d go by rank %d", to, n, at)
					}
					seen[at] = true
					steps++
				}
				if most := bits.Len(uint(n - 1)); steps > most {
					t.Errorf("a call from 0 to %d of %d takes %d steps, above %d", to, n, steps, most)
				}
			}
		}
	}
}

// TestCallsAreBounded passes on more calls than the receiver's stalled connection takes.
func TestCallsAreBounded(t *testing.T) {
	s := newSockets(0, 9, "", 1)
	here, there := net.Pipe()
	join(s, plainChannel(here, 4, ""))
	for range 2 * maxCalls {
		if err := s.onCall(header{kind: frameCall, id: link.MsgID{Group: 1, Seq: 5}, size: callUp}); err != nil {
			t.Fatal(err)
		}
	}
	p := s.peer(4)
	p.mu.Lock()
	if n := len(p.ctrl); n > maxCalls {
		t.Errorf("%d calls wait", n)
	}
	p.mu.Unlock()
	go io.Copy(io.Discard, there)
	s.Close()
	there.Close()
}

// TestHearing counts silence from when the count last changed, over its wrap too, and from the first look.
func TestHearing(t *testing.T) {
	start := time.Date(2026, 11, 22, 14, 3, 0, 0, time.UTC)
	var h hearing
	for i, x := range []struct {
		count       uint32
		after, want time.Duration // in seconds
	}{{5, 0, 0}, {5, 3, 3}, {6, 4, 0}, {6, 9, 5}, {^uint32(0), 10, 0}, {0, 11, 0}, {0, 21, 10}} {
		if got := h.heard(x.count, start.Add(x.after*time.Second)); got != x.want*time.Second {
			t.Errorf("look %d: silent for %v, want %vs", i, got, int(x.want))
		}
	}
}

// TestSleepingReceiver sends more and more to a rank whose host reads nothing. The bytes queued beside the caller's
// views stay within bounds, whatever the receiver accepted before.
func TestSleepingReceiver(t *testing.T) {
	for name, c := range map[string]struct {
		n, bytes int
		accepted bool
	}{
		"small": {4000, maxEager, false}, "empty": {20000, 0, false}, "large": {64, 4 << 20, false},
		"large and accepted": {64, 4 << 20, true},
	} {
		here, there := tcpPair(t)
		ch := plainChannel(here, 1, "pid 1")
		ch.out = writerOf(t, here)
		s := talk(ch)
		p, bufs := s.peer(1), slices.Repeat([][]byte{make([]byte, c.bytes)}, c.n)
		before := heap()
		for i := range c.n {
			if c.accepted {
				h := header{kind: frameAccept, id: link.MsgID{Seq: uint64(i)}, size: uint64(c.bytes)}
				if err := p.onAccept(h); err != nil {
					t.Fatal(err)
				}
			}
		}
		all, _ := post(s, true, bufs...)
		awaitStall(p)
		// Lists of what waits, and a batch of frames that is being written.
		if grown, most := heap()-before, 4*maxPayload+200*c.n; grown > most {
			t.Errorf("%s: %d messages of %d bytes take %d bytes of the sender, above %d", name, c.n, c.bytes, grown, most)
		}
		p.mu.Lock()
		onWire := 0
		for i := range all {
			onWire += all[i].Moved
		}
		p.mu.Unlock()
		if most := eagerWindow + 4<<20; onWire > most { // and the buffers of the two systems
			t.Errorf("%s: %d bytes are on their way, above %d", name, onWire, most)
		}
		there.Close()
		s.Close()
	}
}

// awaitStall returns when the writer has stopped.
func awaitStall(p *peer) {
	for last, same := -1, 0; same < 5; time.Sleep(10 * time.Millisecond) {
		p.mu.Lock()
		now := len(p.ctrl) + len(p.small)
		for _, t := range p.large {
			now += t.Moved
		}
		p.mu.Unlock()
		if now != last {
			same = 0
		}
		last, same = now, same+1
	}
}

// heap returns the bytes of live objects.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// tcpPair makes a connection over the loopback interface. The system buffers little at there, and the rest of the
// output of here waits in the buffer of here.
func tcpPair(t *testing.T) (here, there *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	here = conn.(*net.TCPConn)
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	there = accepted.(*net.TCPConn)
	t.Cleanup(func() { here.Close(); there.Close() })
	if err := errors.Join(here.SetWriteBuffer(2<<20), there.SetReadBuffer(32<<10)); err != nil {
		t.Fatal(err)
	}
	return here, there
}
