package comm

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestFrameGolden(t *testing.T) {
	for _, c := range []struct {
		h    header
		want string
	}{
		{header{frameData, 5, msgID{0x0102030405060708, 9}, 261}, "435046" + "01" + "00000005" + "0102030405060708" + "0000000000000009" + "0000000000000105"},
		{header{frameOffer, 0, msgID{1, 2}, 1 << 20}, "435046" + "02" + "00000000" + "0000000000000001" + "0000000000000002" + "0000000000100000"},
		{header{frameGoodbye, 0, msgID{}, 0}, "435046" + "06" + strings.Repeat("00", 28)},
	} {
		b := make([]byte, headerSize)
		c.h.encode(b)
		if got := hex.EncodeToString(b); got != c.want {
			t.Errorf("%+v is %s, want %s", c.h, got, c.want)
		}
		if h, err := decodeHeader(b); err != nil || h != c.h {
			t.Errorf("%s is %+v (%v), want %+v", c.want, h, err, c.h)
		}
	}
}

func TestFrameRefused(t *testing.T) {
	for name, h := range map[string]header{
		"type 0":            {},
		"type 8":            {kind: 8},
		"stand":             {kind: frameStand, size: maxRanks + 1},
		"long payload":      {kind: frameData, length: maxPayload + 1, size: maxPayload + 1},
		"beyond message":    {kind: frameData, length: 2, size: 1},
		"no progress":       {kind: frameData, size: 1},
		"huge message":      {kind: frameData, length: 1, size: maxMessage + 1},
		"small offer":       {kind: frameOffer, size: maxEager},
		"offer of data":     {kind: frameOffer, length: 1, size: 1 << 20},
		"huge accept":       {kind: frameAccept, size: 1 << 60},
		"credit of nothing": {kind: frameCredit},
		"credit too large":  {kind: frameCredit, size: eagerWindow + 1},
		"empty abort":       {kind: frameAbort},
		"long abort":        {kind: frameAbort, length: maxNote + 1},
		"goodbye of data":   {kind: frameGoodbye, length: 1},
	} {
		b := make([]byte, headerSize)
		h.encode(b)
		if _, err := decodeHeader(b); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v, want %v", name, err, ErrProtocol)
		}
	}
	if _, err := decodeHeader([]byte("CPF")); !errors.Is(err, ErrProtocol) {
		t.Errorf("short header: %v", err)
	}
	if _, err := decodeHeader([]byte("GET / HTTP/1.1\r\nHost: example.org\r\n")); !errors.Is(err, ErrProtocol) {
		t.Errorf("other protocol: %v", err)
	}
}

func TestNote(t *testing.T) {
	for _, cause := range []error{ErrAborted, ErrPeerLost, deadlineError{3 * time.Second}, ErrPeerLeft, fmt.Errorf("%w: 3 and 4", ErrMismatch), errors.New("own words")} {
		e := &PeerError{Rank: 3, Name: "rank 3 (pid 7)", Op: "receive of 4 bytes", Cause: cause}
		got, err := decodeNote(encodeNote(e), 4)
		if err != nil {
			t.Fatal(err)
		}
		if got.Error() != e.Error() || got.Rank != 3 || got.Name != e.Name {
			t.Errorf("%v became %v", e, got)
		}
		for _, c := range causes {
			if errors.Is(e, c) != errors.Is(got, c) {
				t.Errorf("%v is %v: %t, after the wire %t", e, c, errors.Is(e, c), errors.Is(got, c))
			}
		}
	}
	long := &PeerError{Name: "rank 0", Cause: errors.New(strings.Repeat("ü", 5000))}
	b := encodeNote(long)
	if len(b) > maxNote {
		t.Errorf("a note of %d bytes, above %d", len(b), maxNote)
	}
	if _, err := decodeNote(b, 1); err != nil {
		t.Errorf("a clipped note: %v", err)
	}
	if _, err := decodeNote(encodeNote(&PeerError{Rank: 4, Cause: ErrPeerLost}), 4); err == nil {
		t.Error("rank 4 of 4 was accepted")
	}
}

// FuzzDecodeFrame feeds any bytes to both readers of frames. What is accepted must come out
// of the encoder as it went in.
func FuzzDecodeFrame(f *testing.F) {
	note := encodeNote(&PeerError{Rank: 1, Name: "rank 1", Cause: ErrPeerLost})
	for _, h := range []header{
		{frameData, 3, msgID{1, 2}, 3}, {frameData, 0, msgID{}, 0}, {frameOffer, 0, msgID{7, 8}, 1 << 20},
		{frameAccept, 0, msgID{7, 8}, 1 << 20}, {frameCredit, 0, msgID{group: 7}, 4096},
		{frameAbort, len(note), msgID{}, 0}, {frameGoodbye, 0, msgID{}, 0}, {frameData, maxPayload + 1, msgID{}, maxPayload + 1},
	} {
		b := make([]byte, headerSize)
		h.encode(b)
		f.Add(append(b, note...))
	}
	f.Add([]byte("CPF\x01 short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newPlainReader(bytes.NewReader(b))
		for {
			h, err := r.next()
			if err != nil {
				break
			}
			again := make([]byte, headerSize)
			h.encode(again)
			if h2, err := decodeHeader(again); err != nil || h2 != h {
				t.Fatalf("%+v comes back as %+v (%v)", h, h2, err)
			}
			payload := make([]byte, h.length)
			if r.payload(payload) != nil {
				break
			}
			if h.kind == frameAbort {
				if e, err := decodeNote(payload, 4); err == nil {
					if e2, err := decodeNote(encodeNote(e), 4); err == nil && e2.Rank != e.Rank {
						t.Fatalf("%v comes back as %v", e, e2)
					}
				}
			}
		}
		aead, err := newSeal(make([]byte, 32))
		if err != nil {
			t.Fatal(err)
		}
		if h, err := newSealedReader(bytes.NewReader(b), aead).next(); err == nil {
			t.Fatalf("bytes without the key were taken for %+v", h)
		}
	})
}

// TestSealedReplay records frames of a sealed connection and plays them in other ways: all
// but the original order are refused.
func TestSealedReplay(t *testing.T) {
	aead, err := newSeal(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	var frames [][]byte
	w := &sealedWriter{aead: aead}
	for i := range 3 {
		w.out = nil
		w.add(header{frameData, 4, msgID{0, uint64(i)}, 4}, []byte("data"))
		frames = append(frames, w.out)
		if bytes.Contains(w.out, []byte("data")) || bytes.Contains(w.out, []byte("CPF")) {
			t.Fatalf("frame %d can be read: %x", i, w.out)
		}
	}
	flipped := bytes.Clone(frames[0])
	flipped[10] ^= 1
	for name, c := range map[string]struct {
		frames [][]byte
		good   int
	}{
		"in order": {frames, 3}, "twice": {[][]byte{frames[0], frames[0]}, 1}, "left out": {[][]byte{frames[0], frames[2]}, 1},
		"swapped": {[][]byte{frames[1], frames[0]}, 0}, "changed": {[][]byte{flipped}, 0},
	} {
		r, good := newSealedReader(bytes.NewReader(bytes.Join(c.frames, nil)), aead), 0
		for {
			h, err := r.next()
			if err != nil {
				break
			}
			payload := make([]byte, h.length)
			if r.payload(payload); string(payload) != "data" || h.id.seq != uint64(good) {
				t.Fatalf("%s: frame %d is %+v with %q", name, good, h, payload)
			}
			good++
		}
		if good != c.good {
			t.Errorf("%s: %d frames taken, want %d", name, good, c.good)
		}
	}
}

func testIdentity(rank int, sealed bool) *identity {
	m := Mesh{Rank: rank, Size: 3, Secret: []byte("0123456789abcdef"), RunID: "run", Name: fmt.Sprintf("pid %d", rank)}
	return m.identity(sealed)
}

// shake runs both sides of a handshake.
func shake(dialer, acceptor *identity, want int) (dialed, accepted *peer, dialErr, acceptErr error) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	done := make(chan struct{})
	go func() {
		accepted, acceptErr = acceptor.accept(b, func(int) bool { return true })
		b.Close()
		close(done)
	}()
	dialed, dialErr = dialer.dial(a, want)
	a.Close()
	<-done
	return
}

func TestHandshake(t *testing.T) {
	for _, sealed := range []bool{false, true} {
		d, a, err1, err2 := shake(testIdentity(2, sealed), testIdentity(1, sealed), 1)
		if err1 != nil || err2 != nil {
			t.Fatalf("sealed %t: %v, %v", sealed, err1, err2)
		}
		if d.rank != 1 || d.name != "pid 1" || a.rank != 2 || a.name != "pid 2" {
			t.Errorf("the dialer met rank %d (%s), the acceptor rank %d (%s)", d.rank, d.name, a.rank, a.name)
		}
		if sealed && reflect.DeepEqual(a.out.(*sealedWriter).aead, d.out.(*sealedWriter).aead) {
			t.Error("both directions have one key")
		}
	}
}

func TestHandshakeRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(dialer, acceptor *identity)
		want     int
		dialer   string // in the dialer's error
		acceptor string // in the acceptor's
	}{
		"secret":       {func(d, _ *identity) { d.secret = []byte("another secret!!") }, 1, "hung up", "secret"},
		"run":          {func(d, _ *identity) { d.run[0]++ }, 1, "", "another run"},
		"size":         {func(d, _ *identity) { d.size = 4 }, 1, "", "world of 4 ranks, this is one of 3"},
		"lower rank":   {func(d, _ *identity) { d.rank = 0 }, 1, "", "rank 0"},
		"own rank":     {func(d, _ *identity) { d.rank = 1 }, 1, "", "rank 1"},
		"other server": {func(_, a *identity) { a.rank = 0 }, 1, "rank 0", ""},
		"beyond":       {func(d, _ *identity) { d.rank = 9 }, 1, "", "rank 9 of 3"},
		"name":         {func(d, _ *identity) { d.name = "a\x1b[2Jb" }, 1, "", "cannot be printed"},
	} {
		d, a := testIdentity(2, false), testIdentity(1, false)
		c.change(d, a)
		_, _, err1, err2 := shake(d, a, c.want)
		if err1 == nil || err2 == nil || !strings.Contains(err1.Error(), c.dialer) || !strings.Contains(err2.Error(), c.acceptor) {
			t.Errorf("%s: dialer %v, want %q; acceptor %v, want %q", name, err1, c.dialer, err2, c.acceptor)
		}
	}
}

// FuzzHandshake plays a dialer without the secret, and an acceptor, to each side.
func FuzzHandshake(f *testing.F) {
	good := testIdentity(2, false).hello()
	f.Add(good.raw)
	f.Add(append(bytes.Clone(good.raw), make([]byte, 32)...))
	f.Add(good.raw[:20])
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	server := testIdentity(1, false).hello()
	f.Add(append(bytes.Clone(server.raw), make([]byte, 32)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := readHello(bytes.NewReader(b)); err == nil {
			if again := h.encode(); !bytes.Equal(again, h.raw) || !bytes.HasPrefix(b, again) {
				t.Fatalf("%x is read as %+v", b, h)
			}
		}
		if p, err := testIdentity(1, true).accept(&script{in: bytes.NewReader(b)}, func(int) bool { return true }); err == nil {
			t.Fatalf("accepted %+v without a proof", p)
		}
		if p, err := testIdentity(2, true).dial(&script{in: bytes.NewReader(b)}, 1); err == nil {
			t.Fatalf("dialed %+v without a proof", p)
		}
	})
}

// script is a connection on which the other side says what stands in in.
type script struct {
	net.Conn
	in *bytes.Reader
}

func (s *script) Read(b []byte) (int, error)  { return s.in.Read(b) }
func (s *script) Write(b []byte) (int, error) { return len(b), nil }
