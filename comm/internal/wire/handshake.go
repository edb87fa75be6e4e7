package wire

import (
	"bufio"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/shm"
)

// The handshake, before the first frame. The dialing rank is always the higher one.
//
//	dialer -> acceptor   hello: "CPRUNH5\n", rank (4 bytes), size (4), SHA-256 of the run id
//	                     (32), fresh (32), mode (1: p plain, s sealed), length of name (1), name,
//	                     HMAC-SHA256(secret, "cprun hello" ‖ all of that)
//	acceptor -> dialer   hello
//	dialer -> acceptor   HMAC-SHA256(secret, "cprun dialer" ‖ dialer's hello ‖ acceptor's hello)
//	acceptor -> dialer   HMAC-SHA256(secret, "cprun acceptor" ‖ dialer's hello ‖ acceptor's hello)
//	dialer -> acceptor   a ready frame
//
// The code in a hello rejects strangers at the cost of one message; it is no proof, since it can be replayed. Each side
// then proves the secret over both whole hellos, in its role, so that no proof can be replayed or reflected. The fresh
// part of a hello never repeats: random bytes on a plain connection, and otherwise an X25519 public key for this
// handshake alone. The acceptor sends its proof only to a proven dialer with a free place, and refuses by closing.
//
// The end of a connection counts as a death. So the dialer may give up only before its ready frame. After its proof the
// acceptor gives up only at the end of the dialer or of its own world, and then sends a last frame.
//
// The keys of a sealed connection, one for each direction, are HKDF-SHA256 of the X25519 shared secret and the job's
// secret, salted with SHA-256 of both hellos. A later leak of the secret does not reveal recorded traffic. An attacker
// with the secret at the start of a job can take a rank's place.

const (
	// helloBound limits the time of an unknown dialer before its hello, handshakeBound the whole handshake after it.
	helloBound     = time.Second
	handshakeBound = 10 * time.Second
)

// An identity holds a rank's facts for handshakes.
type identity struct {
	rank, size int
	run        [sha256.Size]byte
	name       string
	secret     []byte

	alone bool                             // shares no memory with other ranks
	log   func(format string, args ...any) // not nil
}

// check returns an error for a hello of another job or of another mode.
func (id *identity) check(h *hello, mode Mode) error {
	switch {
	case h.size != id.size:
		return fmt.Errorf("it belongs to a world of %d ranks, this is one of %d", h.size, id.size)
	case !hmac.Equal(h.run[:], id.run[:]):
		return errors.New("it belongs to another run")
	case h.mode != mode:
		return fmt.Errorf("its frames are %v, on this connection they are %v", h.mode, mode)
	}
	return nil
}

// code returns the HMAC of a purpose and of hellos.
func (id *identity) code(purpose string, hellos ...[]byte) []byte {
	m := hmac.New(sha256.New, id.secret)
	m.Write([]byte("cprun " + purpose))
	for _, h := range hellos {
		m.Write(h)
	}
	return m.Sum(nil)
}

var errProof = errors.New("it does not have this job's secret")

// errEnded ends handshakes after the end of the world.
var errEnded = errors.New("the world has ended")

// dial runs the dialer's side of a handshake with rank want. commit reports whether the dialer may still send its ready
// frame. A channel that comes with an error can take a last frame.
func (id *identity) dial(conn net.Conn, mode Mode, want int, commit func() bool) (*channel, error) {
	own, err := id.hello(mode)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(own.raw); err != nil {
		return nil, err
	}
	other, err := id.readHello(conn)
	if err != nil {
		return nil, hungUp(err)
	}
	if err := id.check(other, mode); err != nil {
		return nil, err
	}
	if other.rank != want {
		return nil, fmt.Errorf("it says it is rank %d", other.rank)
	}
	if _, err := conn.Write(id.code("dialer", own.raw, other.raw)); err != nil {
		return nil, err
	}
	if err := id.verify(conn, "acceptor", own, other); err != nil {
		return nil, err
	}
	c, err := id.channel(conn, own, other)
	if err != nil {
		return nil, err
	}
	if !commit() {
		return nil, errEnded
	}
	return c, id.ready(c)
}

// accept runs the acceptor's side. It calls heard after the dialer's hello. reserve takes the place of a connection
// with a rank, or returns why it cannot; the caller gives the place back if accept then returns an error. A channel
// that comes with an error can take a last frame.
func (id *identity) accept(conn net.Conn, mode Mode, heard func(), reserve func(rank int) error) (*channel, error) {
	other, err := id.readHello(conn)
	if err != nil {
		return nil, err
	}
	heard()
	if err := id.check(other, mode); err != nil {
		return nil, err
	}
	if other.rank <= id.rank {
		return nil, fmt.Errorf("it says it is rank %d, which does not dial rank %d", other.rank, id.rank)
	}
	own, err := id.hello(mode)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(own.raw); err != nil {
		return nil, err
	}
	if err := id.verify(conn, "dialer", other, own); err != nil {
		return nil, err
	}
	c, err := id.channel(conn, own, other)
	if err != nil {
		return nil, err
	}
	if err := reserve(other.rank); err != nil {
		return nil, err
	}
	if _, err := conn.Write(id.code("acceptor", other.raw, own.raw)); err != nil {
		return nil, err
	}
	return c, id.awaitReady(c)
}

func (id *identity) verify(conn net.Conn, role string, dialer, acceptor *hello) error {
	var got [sha256.Size]byte
	if _, err := io.ReadFull(conn, got[:]); err != nil {
		return hungUp(err)
	}
	if !hmac.Equal(got[:], id.code(role, dialer.raw, acceptor.raw)) {
		return errProof
	}
	return nil
}

func hungUp(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("it hung up: its secret or run may differ, or it has this rank already")
	}
	return err
}

const (
	helloMagic = "CPRUNH5\n"
	freshSize  = 32 // of an X25519 public key
	maxName    = 255

	// Offsets of the parts of a hello.
	helloRank  = len(helloMagic)
	helloRun   = helloRank + 4 + 4
	helloFresh = helloRun + sha256.Size
	helloMode  = helloFresh + freshSize
	helloFixed = helloMode + 2 // up to the name
)

// A hello is a rank's introduction.
type hello struct {
	mode       Mode
	rank, size int
	run        [sha256.Size]byte
	fresh      [freshSize]byte
	name       string
	raw        []byte           // as sent
	key        *ecdh.PrivateKey // of fresh, in an own hello that is not plain
}

func (h *hello) encode() []byte {
	b := append(make([]byte, 0, helloFixed+len(h.name)+sha256.Size), helloMagic...)
	b = binary.BigEndian.AppendUint32(b, uint32(h.rank))
	b = binary.BigEndian.AppendUint32(b, uint32(h.size))
	b = append(b, h.run[:]...)
	b = append(b, h.fresh[:]...)
	b = append(b, byte(h.mode), byte(len(h.name)))
	return append(b, h.name...)
}

// readHello reads exactly a hello, and returns an error for anything else.
func (id *identity) readHello(r io.Reader) (*hello, error) {
	raw := make([]byte, helloFixed, helloFixed+maxName+sha256.Size)
	if _, err := io.ReadFull(r, raw[:helloRank]); err != nil {
		return nil, err
	}
	if string(raw[:helloRank]) != helloMagic {
		return nil, errors.New("it does not speak this protocol")
	}
	if _, err := io.ReadFull(r, raw[helloRank:]); err != nil {
		return nil, err
	}
	h := &hello{}
	if err := h.fixed(raw); err != nil {
		return nil, err
	}
	raw = raw[:helloFixed+int(raw[helloFixed-1])]
	if _, err := io.ReadFull(r, raw[helloFixed:]); err != nil {
		return nil, err
	}
	h.name = string(raw[helloFixed:])
	code := raw[len(raw) : len(raw)+sha256.Size]
	if _, err := io.ReadFull(r, code); err != nil {
		return nil, err
	}
	if !hmac.Equal(code, id.code("hello", raw)) {
		return nil, errProof
	}
	h.raw = raw[:len(raw)+sha256.Size]
	if !printable(h.name) {
		return nil, errors.New("its name has characters that cannot be printed")
	}
	return h, nil
}

// fixed parses the parts of a hello at fixed offsets.
func (h *hello) fixed(raw []byte) error {
	rank, size := binary.BigEndian.Uint32(raw[helloRank:]), binary.BigEndian.Uint32(raw[helloRank+4:])
	if size > maxRanks || rank >= size {
		return fmt.Errorf("it says rank %d of %d", rank, size)
	}
	h.rank, h.size = int(rank), int(size)
	copy(h.run[:], raw[helloRun:])
	copy(h.fresh[:], raw[helloFresh:])
	h.mode = Mode(raw[helloMode])
	return nil
}

func printable(name string) bool {
	return !strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

// hello returns this rank's hello for a connection.
func (id *identity) hello(mode Mode) (*hello, error) {
	h := &hello{mode: mode, rank: id.rank, size: id.size, run: id.run, name: id.name}
	if mode == Plain {
		rand.Read(h.fresh[:]) // never fails, by its documentation
	} else {
		key, err := ecdh.X25519().GenerateKey(rand.Reader)
		if err != nil {
			return nil, err
		}
		h.key = key
		copy(h.fresh[:], key.PublicKey().Bytes())
	}
	h.raw = h.encode()
	h.raw = append(h.raw, id.code("hello", h.raw)...)
	return h, nil
}

// A channel is a connection after the handshake.
type channel struct {
	net.Conn
	rank int
	name string
	in   frameReader
	out  frameWriter

	raw   syscall.RawConn // over TCP, to be watched
	hears hearing         // guarded by peer.mu

	area    *shm.Area // memory that is shared with the other side, or nil
	pipes   *pipes    // that go with it
	placing bool      // guarded by peer.mu; the other side reads from it
	says    bool      // guarded by peer.mu; this side must send its share frame

	current []*link.Transfer // being sent, once for each piece; for the writer alone until peer.quiet
}

// channel returns the connection for use after the handshake.
func (id *identity) channel(conn net.Conn, own, other *hello) (*channel, error) {
	c := &channel{Conn: conn, rank: other.rank, name: other.name}
	if own.mode == Plain {
		c.in, c.out = newPlainReader(conn), &plainWriter{conn: conn}
		return c, nil
	}
	open, seal, err := id.keys(own, other)
	if err != nil {
		return nil, err
	}
	c.in, c.out = newOpeningReader(conn, open), &sealedWriter{conn: conn, aead: seal}
	return c, nil
}

// keys returns the ciphers of a connection, to read and to write.
func (id *identity) keys(own, other *hello) (open, seal cipher.AEAD, err error) {
	public, err := ecdh.X25519().NewPublicKey(other.fresh[:])
	if err != nil {
		return nil, nil, err
	}
	shared, err := own.key.ECDH(public)
	if err != nil {
		return nil, nil, fmt.Errorf("its key: %w", err)
	}
	own.key = nil // not kept beyond its use
	dialer, acceptor := own, other
	to, from := "cprun frames to the acceptor", "cprun frames to the dialer"
	if own.rank < other.rank { // this rank is the acceptor
		dialer, acceptor, to, from = other, own, from, to
	}
	salt := sha256.Sum256(slices.Concat(dialer.raw, acceptor.raw))
	cipherOf := func(info string) (cipher.AEAD, error) {
		key, err := hkdf.Key(sha256.New, slices.Concat(shared, id.secret), salt[:], info, 32)
		if err != nil {
			return nil, err
		}
		return newSeal(key)
	}
	if open, err = cipherOf(from); err != nil {
		return nil, nil, err
	}
	seal, err = cipherOf(to)
	return open, seal, err
}

// Sealed frames. A header travels as 48 bytes, encrypted and authenticated, so that its length can be trusted. The
// payload follows, encrypted, with a tag of its own.

const (
	tagSize    = 16
	sealedSize = headerSize + tagSize // of a header
)

// errForged is the error of a frame that the peer did not send in this place.
var errForged = fmt.Errorf("%w: a frame is not authentic", blame.ErrProtocol)

func newSeal(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// A counter is the nonce of one direction of a connection: it counts headers and payloads. Each connection has its own
// key, so the nonce starts at zero and cannot repeat.
type counter struct {
	n     uint64
	nonce [12]byte
}

func (c *counter) next() []byte {
	binary.BigEndian.PutUint64(c.nonce[4:], c.n)
	c.n++
	return c.nonce[:]
}

// sealedWriter encrypts frames.
type sealedWriter struct {
	conn  net.Conn
	aead  cipher.AEAD
	count counter
	hdr   [headerSize]byte
	out   []byte
}

func (w *sealedWriter) add(h header, payload []byte) {
	h.encode(w.hdr[:])
	w.out = w.aead.Seal(w.out, w.count.next(), w.hdr[:], nil)
	if len(payload) > 0 {
		w.out = w.aead.Seal(w.out, w.count.next(), payload, nil)
	}
}

func (w *sealedWriter) flush() error {
	_, err := w.conn.Write(w.out)
	w.out = w.out[:0]
	return err
}

// openingReader reads the output of sealedWriter.
type openingReader struct {
	r     *bufio.Reader
	aead  cipher.AEAD
	count counter
	hdr   [sealedSize]byte
	buf   []byte
}

func newOpeningReader(r io.Reader, aead cipher.AEAD) *openingReader {
	return &openingReader{r: bufio.NewReaderSize(r, 64<<10), aead: aead}
}

func (r *openingReader) next() (header, error) {
	if _, err := io.ReadFull(r.r, r.hdr[:]); err != nil {
		return header{}, err
	}
	plain, err := r.aead.Open(r.hdr[:0], r.count.next(), r.hdr[:], nil)
	if err != nil {
		return header{}, errForged
	}
	return decodeHeader(plain)
}

func (r *openingReader) payload(dst []byte) error {
	if len(dst) == 0 {
		return nil
	}
	n := len(dst) + tagSize
	if cap(r.buf) < n {
		r.buf = make([]byte, n)
	}
	sealed := r.buf[:n]
	if _, err := io.ReadFull(r.r, sealed); err != nil {
		return err
	}
	if _, err := r.aead.Open(dst[:0:len(dst)], r.count.next(), sealed, nil); err != nil {
		return errForged
	}
	return nil
}
