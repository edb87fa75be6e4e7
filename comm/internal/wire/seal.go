package wire

import (
	"bufio"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"io"
	"net"

	"github.com/cprun/cprun/comm/internal/blame"
)

// Sealed frames. A header travels as 48 bytes, encrypted and authenticated, so that its length can be
// trusted before anything is read by it. The payload follows, encrypted, with a tag of its own.

const (
	tagSize    = 16
	sealedSize = headerSize + tagSize // of a header
)

// errForged is the fault of a frame that the peer has not sent here and now.
var errForged = fmt.Errorf("%w: a frame is not authentic", blame.ErrProtocol)

func newSeal(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// A counter is the nonce of a connection and direction: it counts headers and payloads. A key is never
// used on another connection, so it starts at zero and cannot repeat.
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

// openingReader reads what sealedWriter writes.
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
