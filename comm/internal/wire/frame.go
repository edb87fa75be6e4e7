package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/shm"
)

// The wire format. Every frame between two ranks begins with this header; integers are
// big-endian:
//
//	byte  0..2   "CPF"
//	byte  3      type
//	byte  4..7   length of the payload after the header, at most 262144
//	byte  8..15  group id, 0 for the world
//	byte 16..23  number of the message among those from the sending to the receiving rank of
//	             the message in this group, from 0
//	byte 24..31  size, by type
//
//	type        payload         size
//	1 data      an eager        its bytes, at most 16384
//	            message
//	2 offer     none            bytes of a message that waits to be accepted
//	3 accept    none            bytes that the receiver has room for, in place
//	4 credit    none            bytes of the eager window given back; number is 0
//	5 abort     see abortNote   0; group and number are 0
//	6 goodbye   none            0; group and number are 0
//	7 status    a name, or      1 + the rank that a rank has waited for up to its deadline, 0
//	            nothing         when it waits no longer, 2^32 when it has left; group is the
//	                            announcing rank, number counts its announcements. The name
//	                            belongs to the awaited rank, or to the one that has left
//	8 call      none            1 on its way up, 2 on its way down; group is a rank that needs
//	                            a connection with the higher one that is the number
//	9 ready     none            0; group and number are 0. The dialer's first frame
//	10 piece    a piece of a    where in the message it begins, at a multiple of 262144. It has
//	            large message   262144 bytes, or goes to the end of the message
//	11 share    none            0; group and number are 0. The sender reads from the shared memory,
//	                            and sends all later frames through its pipe
//	12 placed   none            where in the message a piece begins that lies in the shared memory,
//	                            after earlier pieces. It has 131072 bytes, or goes to the end
//	13 room     none            0; group and number are 0. The shared memory has room again
//
// A message of up to 16 KiB is eager: the sender sends it at once, as one data frame, while the group's messages that
// the receiver has not taken, plus 32 bytes each, stay within a window of 128 KiB. A larger one goes straight into its
// destination after the receiver has accepted it. So no receiver holds back one group's frames for another's, and its
// buffers are bounded.
//
// Two ranks have one connection. Pieces of a message come in order; several messages take turns.
//
// Two ranks of a node may share memory, a ring of bytes for each direction (comm/internal/shm), and two pipes. The
// dialer attaches three descriptors to the ready frame: of the memory, of the pipe that the acceptor reads, and of the
// pipe that it writes. An acceptor that takes them sends share as its first frame, and the dialer answers with one. A
// share frame is the last on the socket: after it a side writes pieces of large messages into its ring, in the order of
// their placed frames, and all frames into its pipe. A writer without room sets a flag in the memory, and the reader of
// the next piece sends a room frame.
//
// Unix sockets and pipes carry frames unencrypted. On TCP each header is sealed under AES-256-GCM, to 48 bytes; the
// sealed payload follows. Each connection and direction has its own key. The nonce counts headers and payloads from 0
// (4 zero bytes, then 8 bytes). Both ends count, so that a frame is accepted once, in its place, on its connection.

type frameType uint8

const (
	frameData frameType = 1 + iota
	frameOffer
	frameAccept
	frameCredit
	frameAbort
	frameGoodbye
	frameStatus
	frameCall
	frameReady
	framePiece
	frameShare
	framePlaced
	frameRoom
)

const (
	headerSize  = 32
	maxPayload  = 256 << 10
	maxPlaced   = 128 << 10 // of a piece in shared memory: half of a ring, so that both sides copy at once
	maxMessage  = 1 << 46
	maxEager    = 16 << 10
	eagerWindow = 128 << 10
	maxNote     = 8 << 10

	leftMark = 1 << 32 // the size of the last status of a rank that has left
)

// A header is the fixed part of a frame.
type header struct {
	kind   frameType
	length int
	id     link.MsgID
	size   uint64
}

func (h header) encode(b []byte) {
	copy(b, "CPF")
	b[3] = byte(h.kind)
	binary.BigEndian.PutUint32(b[4:], uint32(h.length))
	binary.BigEndian.PutUint64(b[8:], h.id.Group)
	binary.BigEndian.PutUint64(b[16:], h.id.Seq)
	binary.BigEndian.PutUint64(b[24:], h.size)
}

// decodeHeader reads a header and returns an error for invalid ones, before anything is allocated.
func decodeHeader(b []byte) (header, error) {
	if len(b) < headerSize || string(b[:3]) != "CPF" {
		return header{}, fmt.Errorf("%w: no frame header", blame.ErrProtocol)
	}
	length := binary.BigEndian.Uint32(b[4:])
	h := header{
		kind:   frameType(b[3]),
		length: int(min(length, maxPayload+1)),
		id:     link.MsgID{Group: binary.BigEndian.Uint64(b[8:]), Seq: binary.BigEndian.Uint64(b[16:])},
		size:   binary.BigEndian.Uint64(b[24:]),
	}
	var ok bool
	switch h.kind {
	case frameData:
		ok = h.length <= maxEager && uint64(h.length) == h.size
	case frameOffer, frameAccept:
		ok = h.length == 0 && h.size > maxEager && h.size <= maxMessage
	case frameCredit:
		ok = h.length == 0 && h.id.Seq == 0 && h.size > 0 && h.size <= eagerWindow
	case frameAbort:
		ok = h.length > 0 && h.length <= maxNote && h.id == link.MsgID{} && h.size == 0
	case frameStatus:
		ok = h.length <= maxName && h.id.Group < maxRanks && h.id.Seq > 0 &&
			(h.size <= maxRanks || h.size == leftMark) && (h.id.Seq == lastWord) == (h.size == leftMark)
	case frameCall:
		ok = h.length == 0 && h.id.Group < h.id.Seq && h.id.Seq < maxRanks && (h.size == callUp || h.size == callDown)
	case framePlaced:
		ok = h.length == 0 && h.size < maxMessage
	case frameGoodbye, frameReady, frameShare, frameRoom:
		ok = h.length == 0 && h.id == link.MsgID{} && h.size == 0
	case framePiece:
		ok = h.length > 0 && h.length <= maxPayload && h.size%maxPayload == 0 && h.size <= maxMessage-uint64(h.length)
	}
	if !ok {
		return header{}, fmt.Errorf("%w: frame of type %d with a payload of %d bytes and size %d", blame.ErrProtocol,
			b[3], length, h.size)
	}
	return h, nil
}

// causes lists the errors that keep their identity from rank to rank, by number on the wire.
var causes = [...]error{blame.ErrAborted, blame.ErrPeerLost, blame.ErrDeadline, blame.ErrPeerLeft, blame.ErrMismatch,
	blame.ErrProtocol}

// encodeNote returns the payload of an abort frame:
//
//	byte 0..3  the rank to blame
//	byte 4     index of the cause: 0 aborted, 1 lost, 2 deadline, 3 left, 4 mismatch,
//	           5 protocol, 255 none of these
//	then       three strings, each 2 bytes of length and UTF-8: the name of that rank, what
//	           was waiting, and the cause in words
func encodeNote(e *blame.PeerError) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(e.Rank))
	code := byte(255)
	for i, c := range causes {
		if errors.Is(e.Cause, c) {
			code = byte(i)
			break
		}
	}
	b = append(b, code)
	for _, s := range []string{e.Name, e.Op, e.Cause.Error()} {
		s = strings.ToValidUTF8(s[:min(len(s), 2000)], "")
		b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
		b = append(b, s...)
	}
	return b
}

// decodeNote reads the output of encodeNote, in a world of the given size.
func decodeNote(b []byte, size int) (*blame.PeerError, error) {
	bad := fmt.Errorf("%w: malformed abort frame", blame.ErrProtocol)
	if len(b) < 5 {
		return nil, bad
	}
	rank, code := binary.BigEndian.Uint32(b), b[4]
	b = b[5:]
	var words [3]string
	for i := range words {
		if len(b) < 2 {
			return nil, bad
		}
		n := int(binary.BigEndian.Uint16(b))
		if b = b[2:]; len(b) < n || !utf8.Valid(b[:n]) {
			return nil, bad
		}
		words[i], b = clean(string(b[:n])), b[n:]
	}
	if len(b) > 0 || uint64(rank) >= uint64(size) || int(code) >= len(causes) && code != 255 {
		return nil, bad
	}
	var cause error
	if code != 255 {
		cause = causes[code]
	}
	return &blame.PeerError{Rank: int(rank), Name: words[0], Op: words[1], Cause: &notedError{words[2], cause}}, nil
}

// clean replaces terminal control characters in another rank's words.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

// A notedError is a cause from another rank, as text.
type notedError struct {
	text  string
	cause error // one of causes, or nil
}

func (e *notedError) Error() string { return e.text }
func (e *notedError) Unwrap() error { return e.cause }

// A frameWriter collects frames and writes them with one system call. One goroutine uses it.
type frameWriter interface {
	// add takes a frame; flush reads the payload.
	add(h header, payload []byte)
	flush() error // sends all added frames
}

// A frameReader reads frames one by one. One goroutine uses it.
type frameReader interface {
	next() (header, error)
	// payload fills dst, of the length in the last header. The caller calls it once for each length above 0; for 0 it
	// does nothing. After an error the contents of dst are undefined.
	payload(dst []byte) error
}

// maxBatch bounds the frames between two flushes of a frameWriter.
const maxBatch = 32

// plainWriter sends frames unchanged, payloads straight from their memory (writev).
type plainWriter struct {
	conn net.Conn
	hdrs [maxBatch * headerSize]byte
	n    int
	back [2 * maxBatch][]byte
	bufs net.Buffers

	ring   *shm.Ring // for placed pieces
	placed [][]byte
	pipes  *pipes // for all frames after a share frame
	moves  bool   // a share frame has been added
	moved  bool
}

func (w *plainWriter) add(h header, payload []byte) {
	if w.n == 0 {
		w.bufs = w.back[:0]
	}
	b := w.hdrs[w.n*headerSize:][:headerSize]
	w.n++
	h.encode(b)
	w.bufs = append(w.bufs, b)
	switch {
	case h.kind == framePlaced:
		w.placed = append(w.placed, payload)
	case h.kind == frameShare:
		w.moves = true
	case len(payload) > 0:
		w.bufs = append(w.bufs, payload)
	}
}

func (w *plainWriter) flush() error {
	w.n = 0
	for _, piece := range w.placed {
		w.ring.Put(piece)
	}
	clear(w.placed)
	w.placed = w.placed[:0]
	err := w.write()
	w.moved = w.moved || w.moves
	clear(w.back[:])
	return err
}

func (w *plainWriter) write() error {
	if w.moved {
		return w.pipes.send(w.bufs)
	}
	_, err := w.bufs.WriteTo(w.conn)
	return err
}

// plainReader reads small frames through a buffer, and large payloads directly.
type plainReader struct {
	r   *bufio.Reader
	hdr [headerSize]byte
}

func newPlainReader(r io.Reader) *plainReader {
	return &plainReader{r: bufio.NewReaderSize(r, 64<<10)}
}

func (r *plainReader) next() (header, error) {
	if _, err := io.ReadFull(r.r, r.hdr[:]); err != nil {
		return header{}, err
	}
	return decodeHeader(r.hdr[:])
}

func (r *plainReader) drained() bool { return r.r.Buffered() == 0 }

func (r *plainReader) payload(dst []byte) error {
	_, err := io.ReadFull(r.r, dst)
	return err
}
