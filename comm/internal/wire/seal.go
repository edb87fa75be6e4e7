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

// Frames that are sealed or signed. A header travels as 48 bytes, encrypted and authenticated, so
// that its length is to be trusted before anything is read by it. A payload follows that is
// encrypted, or as it is, and has a tag of its own behind it. So a payload is neither gathered with
// its header nor parted from it: it is read from where it lies and written to where it belongs.

const (
	tagSize    = 16
	sealedSize = headerSize + tagSize // of a header
)

// errForged is the fault of a frame that the peer has not sent here and now.
var errForged = fmt.Errorf("%w: a frame is not authentic", blame.ErrProtocol)

// newSeal returns the cipher of one connection and direction.
func newSeal(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// counter is the nonce of a connection and direction: it counts headers and payloads. A key is never
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

// sealedWriter encrypts payloads.
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

// signedWriter sends payloads from where they lie, with a tag behind each.
type signedWriter struct {
	conn  net.Conn
	aead  cipher.AEAD
	count counter
	hdr   [headerSize]byte
	small [maxBatch * (sealedSize + tagSize)]byte // headers and tags
	used  int
	back  [3 * maxBatch][]byte
	bufs  net.Buffers
}

// room returns the place of what comes next, to append to.
func (w *signedWriter) room(n int) []byte {
	w.used += n
	return w.small[w.used-n : w.used-n : w.used]
}

func (w *signedWriter) add(h header, payload []byte) {
	if w.used == 0 {
		w.bufs = w.back[:0]
	}
	h.encode(w.hdr[:])
	w.bufs = append(w.bufs, w.aead.Seal(w.room(sealedSize), w.count.next(), w.hdr[:], nil))
	if len(payload) > 0 {
		w.bufs = append(w.bufs, payload, w.aead.Seal(w.room(tagSize), w.count.next(), nil, payload))
	}
}

func (w *signedWriter) flush() error {
	w.used = 0
	_, err := w.bufs.WriteTo(w.conn)
	clear(w.back[:])
	return err
}

// openingReader reads what both of them write.
type openingReader struct {
	r     *bufio.Reader
	aead  cipher.AEAD
	clear bool // payloads are not encrypted
	count counter
	hdr   [sealedSize]byte
	buf   []byte
}

func newOpeningReader(r io.Reader, aead cipher.AEAD, clear bool) *openingReader {
	return &openingReader{r: bufio.NewReaderSize(r, 64<<10), aead: aead, clear: clear}
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
	if r.clear {
		return r.check(dst)
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

// check reads a payload that is not encrypted, and then its tag.
func (r *openingReader) check(dst []byte) error {
	if _, err := io.ReadFull(r.r, dst); err != nil {
		return err
	}
	tag := r.hdr[:tagSize]
	if _, err := io.ReadFull(r.r, tag); err != nil {
		return err
	}
	if _, err := r.aead.Open(nil, r.count.next(), tag, dst); err != nil {
		return errForged
	}
	return nil
}
