package wire

import (
	"bytes"
	"crypto/cipher"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

func TestFrameGolden(t *testing.T) {
	for _, c := range []struct {
		h    header
		want string
	}{
		{header{frameData, 5, link.MsgID{Group: 0x0102030405060708, Seq: 9}, 5}, "435046" + "01" + "00000005" + "0102030405060708" + "0000000000000009" + "0000000000000005"},
		{header{framePiece, 5, link.MsgID{Group: 1, Seq: 2}, 1 << 18}, "435046" + "0a" + "00000005" + "0000000000000001" + "0000000000000002" + "0000000000040000"},
		{header{frameOffer, 0, link.MsgID{Group: 1, Seq: 2}, 1 << 20}, "435046" + "02" + "00000000" + "0000000000000001" + "0000000000000002" + "0000000000100000"},
		{header{framePlaced, 0, link.MsgID{Group: 1, Seq: 2}, 1 << 17}, "435046" + "0c" + "00000000" + "0000000000000001" + "0000000000000002" + "0000000000020000"},
		{header{frameGoodbye, 0, link.MsgID{}, 0}, "435046" + "06" + strings.Repeat("00", 28)},
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
		"type 99":           {kind: 99},
		"stand":             {kind: frameStatus, id: link.MsgID{Seq: 1}, size: maxRanks + 1},
		"not numbered":      {kind: frameStatus, size: 1},
		"left too early":    {kind: frameStatus, id: link.MsgID{Seq: 1}, size: leftMark},
		"a word too late":   {kind: frameStatus, id: link.MsgID{Seq: lastWord}, size: 1},
		"long name":         {kind: frameStatus, id: link.MsgID{Seq: 1}, length: maxName + 1},
		"call downwards":    {kind: frameCall, id: link.MsgID{Group: 2, Seq: 1}, size: callUp},
		"call of no way":    {kind: frameCall, id: link.MsgID{Group: 1, Seq: 2}},
		"ready for data":    {kind: frameReady, length: 1},
		"long message":      {kind: frameData, length: maxEager + 1, size: maxEager + 1},
		"two sizes":         {kind: frameData, length: 2, size: 1},
		"long piece":        {kind: framePiece, length: maxPayload + 1},
		"empty piece":       {kind: framePiece},
		"piece in between":  {kind: framePiece, length: 1, size: 1},
		"piece too far":     {kind: framePiece, length: 1, size: maxMessage},
		"placed bytes":      {kind: framePlaced, length: 1},
		"placed too far":    {kind: framePlaced, size: maxMessage},
		"share of data":     {kind: frameShare, length: 1},
		"room of a group":   {kind: frameRoom, id: link.MsgID{Group: 1}},
		"small offer":       {kind: frameOffer, size: maxEager},
		"offer of data":     {kind: frameOffer, length: 1, size: 1 << 20},
		"huge accept":       {kind: frameAccept, size: 1 << 60},
		"credit of nothing": {kind: frameCredit},
		"credit too large":  {kind: frameCredit, size: eagerWindow + 1},
		"empty abort":       {kind: frameAbort},
		"long abort":        {kind: frameAbort, length: maxNote + 1},
		"goodbye of data":   {kind: frameGoodbye, length: 1},
		"goodbye of a size": {kind: frameGoodbye, size: 1},
	} {
		b := make([]byte, headerSize)
		h.encode(b)
		if _, err := decodeHeader(b); !errors.Is(err, blame.ErrProtocol) {
			t.Errorf("%s: %v, want %v", name, err, blame.ErrProtocol)
		}
	}
	for _, raw := range []string{"CPF", "GET / HTTP/1.1\r\nHost: example.org\r\n"} {
		if _, err := decodeHeader([]byte(raw)); !errors.Is(err, blame.ErrProtocol) {
			t.Errorf("%q: %v", raw, err)
		}
	}
}

func TestNote(t *testing.T) {
	for _, cause := range []error{blame.ErrAborted, blame.ErrPeerLost, blame.Deadline(3 * time.Second), blame.ErrPeerLeft, fmt.Errorf("%w: 3 and 4", blame.ErrMismatch), errors.New("own words")} {
		e := &blame.PeerError{Rank: 3, Name: "rank 3 (pid 7)", Op: "receive of 4 bytes", Cause: cause}
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
	for want, odd := range map[string]*blame.PeerError{
		"rank 1 (\ufffd[2J): two\nlines\ufffd": {Rank: 1, Name: "rank 1 (\x1b[2J)", Cause: errors.New("two\nlines\a")},
		": file  is gone":                      {Rank: 1, Cause: errors.New("file \xff is gone")}, // its name is no UTF-8
	} {
		if got, err := decodeNote(encodeNote(odd), 2); err != nil || got.Error() != want {
			t.Errorf("a note became %q (%v), want %q", got, err, want)
		}
	}
	long := &blame.PeerError{Name: "rank 0", Cause: errors.New(strings.Repeat("ü", 5000))}
	b := encodeNote(long)
	if len(b) > maxNote {
		t.Errorf("a note of %d bytes, above %d", len(b), maxNote)
	}
	if _, err := decodeNote(b, 1); err != nil {
		t.Errorf("a clipped note: %v", err)
	}
	if _, err := decodeNote(encodeNote(&blame.PeerError{Rank: 4, Cause: blame.ErrPeerLost}), 4); err == nil {
		t.Error("rank 4 of 4 was accepted")
	}
}

// A recorder is a connection that keeps its output.
type recorder struct {
	net.Conn
	bytes.Buffer
}

func (r *recorder) Read(b []byte) (int, error)  { return r.Buffer.Read(b) }
func (r *recorder) Write(b []byte) (int, error) { return r.Buffer.Write(b) }

// testSeal returns the cipher of sealed frames.
func testSeal(t *testing.T) cipher.AEAD {
	t.Helper()
	aead, err := newSeal(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	return aead
}

// writerOf returns a writer of sealed frames.
func writerOf(t *testing.T, conn net.Conn) frameWriter {
	t.Helper()
	return &sealedWriter{conn: conn, aead: testSeal(t)}
}

// readAll reads frames, and returns their payloads up to the first that is refused, and why.
func readAll(t *testing.T, raw []byte) (got []string, err error) {
	t.Helper()
	r := newOpeningReader(bytes.NewReader(raw), testSeal(t))
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

// FuzzDecodeFrame feeds any bytes to both readers of frames. What is accepted must come out
// of the encoder as it went in.
func FuzzDecodeFrame(f *testing.F) {
	note := encodeNote(&blame.PeerError{Rank: 1, Name: "rank 1", Cause: blame.ErrPeerLost})
	for _, h := range []header{
		{frameData, 3, link.MsgID{Group: 1, Seq: 2}, 3}, {frameData, 0, link.MsgID{}, 0}, {framePiece, 9, link.MsgID{Group: 7, Seq: 8}, maxPayload}, {frameOffer, 0, link.MsgID{Group: 7, Seq: 8}, 1 << 20},
		{frameAccept, 0, link.MsgID{Group: 7, Seq: 8}, 1 << 20}, {frameCredit, 0, link.MsgID{Group: 7}, 4096},
		{frameAbort, len(note), link.MsgID{}, 0}, {frameGoodbye, 0, link.MsgID{}, 0}, {framePiece, maxPayload + 1, link.MsgID{}, 0},
		{framePlaced, 0, link.MsgID{Group: 7, Seq: 8}, maxPlaced}, {frameShare, 0, link.MsgID{}, 0}, {frameRoom, 0, link.MsgID{}, 0},
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
		if h, err := newOpeningReader(bytes.NewReader(b), testSeal(t)).next(); err == nil {
			t.Fatalf("bytes without the key were taken for %+v", h)
		}
	})
}
