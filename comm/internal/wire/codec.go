package wire

import (
	"bufio"
	"io"
	"net"

	"github.com/cprun/cprun/comm/internal/shm"
)

// A frameWriter collects frames and writes them with one system call. It is used by one
// goroutine.
type frameWriter interface {
	// add takes a frame; the payload is read until flush has returned.
	add(h header, payload []byte)
	flush() error // sends what was added
}

// A frameReader reads frames one by one. It is used by one goroutine.
type frameReader interface {
	next() (header, error)
	// payload fills dst, whose length is the length that the last header said. It is called once
	// for each header that says one above 0. What dst holds after an error means nothing.
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

	ring   *shm.Ring // where placed pieces go
	placed [][]byte
	pipes  *pipes // where all goes behind a share frame
	moves  bool   // one has been added
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

// drained reports whether nothing has been read ahead of what it returned.
func (r *plainReader) drained() bool { return r.r.Buffered() == 0 }

func (r *plainReader) payload(dst []byte) error {
	_, err := io.ReadFull(r.r, dst)
	return err
}
