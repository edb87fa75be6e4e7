package comm

import (
	"bufio"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"io"
	"net"
)

// A frameWriter collects frames and writes them with one system call. It is used by one
// goroutine.
type frameWriter interface {
	// add takes a frame; the payload is read until flush has returned.
	add(h header, payload []byte)
	flush() error
}

// A frameReader reads frames one by one. It is used by one goroutine.
type frameReader interface {
	next() (header, error)
	// payload fills dst, whose length is the length that the last header said.
	payload(dst []byte) error
}

// maxBatch is how many frames a frameWriter takes between two flushes.
const maxBatch = 32

// plainWriter sends frames as they are, payloads straight from where they lie (writev).
type plainWriter struct {
	conn net.Conn
	hdrs [maxBatch * headerSize]byte
	n    int
	back [2 * maxBatch][]byte
	bufs net.Buffers
}

func (w *plainWriter) add(h header, payload []byte) {
	if w.n == 0 {
		w.bufs = w.back[:0]
	}
	b := w.hdrs[w.n*headerSize:][:headerSize]
	w.n++
	h.encode(b)
	w.bufs = append(w.bufs, b)
	if len(payload) > 0 {
		w.bufs = append(w.bufs, payload)
	}
}

func (w *plainWriter) flush() error {
	w.n = 0
	_, err := w.bufs.WriteTo(w.conn)
	clear(w.back[:])
	return err
}

// plainReader reads small frames through a buffer and large payloads past it.
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

func (r *plainReader) payload(dst []byte) error {
	_, err := io.ReadFull(r.r, dst)
	return err
}

// newSeal is the cipher of one connection and direction.
func newSeal(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

const sealOverhead = 16

// counter is the nonce of a sealed connection. A key is never used on another connection,
// so it starts at zero and cannot repeat.
type counter struct {
	n     uint64
	nonce [12]byte
}

func (c *counter) next() []byte {
	binary.BigEndian.PutUint64(c.nonce[4:], c.n)
	c.n++
	return c.nonce[:]
}

// sealedWriter seals each frame.
type sealedWriter struct {
	conn  net.Conn
	aead  cipher.AEAD
	count counter
	out   []byte
	plain []byte
}

func (w *sealedWriter) add(h header, payload []byte) {
	w.out = binary.BigEndian.AppendUint32(w.out, uint32(headerSize+len(payload)+sealOverhead))
	w.plain = append(w.plain[:0], make([]byte, headerSize)...)
	h.encode(w.plain)
	w.plain = append(w.plain, payload...)
	w.out = w.aead.Seal(w.out, w.count.next(), w.plain, nil)
}

func (w *sealedWriter) flush() error {
	_, err := w.conn.Write(w.out)
	w.out = w.out[:0]
	return err
}

// sealedReader opens each frame.
type sealedReader struct {
	r     *bufio.Reader
	aead  cipher.AEAD
	count counter
	buf   []byte
	rest  []byte // the payload of the frame last opened
}

func newSealedReader(r io.Reader, aead cipher.AEAD) *sealedReader {
	return &sealedReader{r: bufio.NewReaderSize(r, 64<<10), aead: aead}
}

func (r *sealedReader) next() (header, error) {
	var prefix [4]byte
	if _, err := io.ReadFull(r.r, prefix[:]); err != nil {
		return header{}, err
	}
	n := binary.BigEndian.Uint32(prefix[:])
	if n < headerSize+sealOverhead || n > headerSize+maxPayload+sealOverhead {
		return header{}, fmt.Errorf("%w: sealed frame of %d bytes", ErrProtocol, n)
	}
	if cap(r.buf) < int(n) {
		r.buf = make([]byte, n)
	}
	sealed := r.buf[:n]
	if _, err := io.ReadFull(r.r, sealed); err != nil {
		return header{}, err
	}
	plain, err := r.aead.Open(sealed[:0], r.count.next(), sealed, nil)
	if err != nil {
		return header{}, fmt.Errorf("%w: a frame is not authentic", ErrProtocol)
	}
	h, err := decodeHeader(plain)
	if err == nil && h.length != len(plain)-headerSize {
		err = fmt.Errorf("%w: payload of %d bytes in a frame of %d", ErrProtocol, h.length, len(plain))
	}
	r.rest = plain[headerSize:]
	return h, err
}

func (r *sealedReader) payload(dst []byte) error {
	copy(dst, r.rest)
	return nil
}
