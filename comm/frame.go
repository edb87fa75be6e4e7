package comm

// The wire format. Every frame between two ranks begins with this header; integers are
// big-endian:
//
//	byte  0..2   "CPF"
//	byte  3      type
//	byte  4..7   length of the payload behind the header, at most 262144
//	byte  8..15  group id, 0 for the world
//	byte 16..23  number of the message among those from the sending to the receiving rank of
//	             the message in this group, from 0
//	byte 24..31  size, by type
//
//	type        payload         size
//	1 data      a piece of the  bytes of the whole message; pieces come in order
//	            message
//	2 offer     none            bytes of a message that waits to be accepted
//	3 accept    none            bytes that the receiver has room for, in place
//	4 credit    none            bytes of the eager window given back; number is 0
//	5 abort     see abortNote   0; group and number are 0
//	6 goodbye   none            0; group and number are 0
//	7 stand     none            1 + the rank that the sender has waited for up to its
//	                            deadline, 0 when it waits no longer; group and number are 0
//
// A message of up to 16 KiB is eager: it is sent at once, as one data frame, as long as the
// messages of its group that the receiver has not taken, with 32 bytes added for each, stay
// within a window of 128 KiB. A larger one is sent once its receiver has accepted it, straight
// into the destination. So no receiver has to hold back one group's frames for another's,
// and what it buffers is bounded.
//
// On Unix sockets frames follow each other as they are. On TCP each is sealed: 4 bytes with
// the length of the rest, then header and payload under AES-256-GCM with its 16-byte tag. The
// key is of one connection and direction, the nonce counts its frames from 0 (4 zero bytes,
// then 8 bytes), and both ends count, so that a frame is accepted once, in its place.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

type frameType uint8

const (
	frameData frameType = 1 + iota
	frameOffer
	frameAccept
	frameCredit
	frameAbort
	frameGoodbye
	frameStand
)

const (
	headerSize  = 32
	maxPayload  = 256 << 10
	maxMessage  = 1 << 46
	maxEager    = 16 << 10
	eagerWindow = 128 << 10
	maxNote     = 8 << 10
)

// header is the fixed part of a frame.
type header struct {
	kind   frameType
	length int
	id     msgID
	size   uint64
}

func (h header) encode(b []byte) {
	copy(b, "CPF")
	b[3] = byte(h.kind)
	binary.BigEndian.PutUint32(b[4:], uint32(h.length))
	binary.BigEndian.PutUint64(b[8:], h.id.group)
	binary.BigEndian.PutUint64(b[16:], h.id.seq)
	binary.BigEndian.PutUint64(b[24:], h.size)
}

// decodeHeader reads a header and refuses all that no rank sends, before anything is
// allocated for it.
func decodeHeader(b []byte) (header, error) {
	if len(b) < headerSize || string(b[:3]) != "CPF" {
		return header{}, fmt.Errorf("%w: no frame header", ErrProtocol)
	}
	length := binary.BigEndian.Uint32(b[4:])
	h := header{
		kind:   frameType(b[3]),
		length: int(min(length, maxPayload+1)),
		id:     msgID{binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])},
		size:   binary.BigEndian.Uint64(b[24:]),
	}
	var ok bool
	switch h.kind {
	case frameData:
		ok = h.length <= maxPayload && h.size <= maxMessage && uint64(h.length) <= h.size && (h.length > 0 || h.size == 0)
	case frameOffer, frameAccept:
		ok = h.length == 0 && h.size > maxEager && h.size <= maxMessage
	case frameCredit:
		ok = h.length == 0 && h.id.seq == 0 && h.size > 0 && h.size <= eagerWindow
	case frameAbort:
		ok = h.length > 0 && h.length <= maxNote && h.id == msgID{} && h.size == 0
	case frameStand:
		ok = h.length == 0 && h.id == msgID{} && h.size <= maxRanks
	case frameGoodbye:
		ok = h.length == 0 && h.id == msgID{} && h.size == 0
	}
	if !ok {
		return header{}, fmt.Errorf("%w: frame of type %d with a payload of %d bytes and size %d", ErrProtocol, b[3], length, h.size)
	}
	return h, nil
}

// causes are the sentinels that keep their identity from rank to rank, by their number on
// the wire.
var causes = [...]error{ErrAborted, ErrPeerLost, ErrDeadline, ErrPeerLeft, ErrMismatch, ErrProtocol}

// encodeNote is the payload of an abort frame:
//
//	byte 0..3  the rank to blame
//	byte 4     index of the cause: 0 aborted, 1 lost, 2 deadline, 3 left, 4 mismatch,
//	           5 protocol, 255 none of these
//	then       three strings, each 2 bytes of length and UTF-8: the name of that rank, what
//	           was waiting, and the cause in words
func encodeNote(e *PeerError) []byte {
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
		s = clip(s, 2000)
		b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
		b = append(b, s...)
	}
	return b
}

// clip cuts a string between runes.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// decodeNote reads what encodeNote wrote, in a world of the given size.
func decodeNote(b []byte, size int) (*PeerError, error) {
	bad := fmt.Errorf("%w: malformed abort frame", ErrProtocol)
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
		words[i], b = string(b[:n]), b[n:]
	}
	if len(b) > 0 || uint64(rank) >= uint64(size) || int(code) >= len(causes) && code != 255 {
		return nil, bad
	}
	var cause error
	if code != 255 {
		cause = causes[code]
	}
	return &PeerError{Rank: int(rank), Name: words[0], Op: words[1], Cause: &notedError{words[2], cause}}, nil
}

// notedError is a cause that another rank has put in words.
type notedError struct {
	text  string
	cause error // one of causes, or nil
}

func (e *notedError) Error() string { return e.text }
func (e *notedError) Unwrap() error { return e.cause }
