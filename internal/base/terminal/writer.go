package terminal

import (
	"bytes"
	"fmt"
	"io"
	"unicode/utf8"
)

// maxHeld bounds what a Writer keeps of a sequence that does not end.
const maxHeld = 4 << 10

// Writer passes on what Text leaves of what is written, in whatever pieces it comes: a sequence
// that begins in one piece may end in another. It is used from one goroutine.
type Writer struct {
	w    io.Writer
	held []byte // the end of what was written that only what follows can tell
	out  []byte
}

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write passes on a piece. It returns the length of p, not of what is left of it.
func (w *Writer) Write(p []byte) (int, error) {
	return len(p), w.pass(p, false)
}

// Flush passes on what was kept, at the end.
func (w *Writer) Flush() error { return w.pass(nil, true) }

// pass cleans what was kept and p.
func (w *Writer) pass(p []byte, end bool) error {
	all := p
	if len(w.held) > 0 {
		all = append(w.held, p...)
	}
	out, rest := clean(w.out[:0], all, mode{lines: true, end: end})
	if len(rest) > maxHeld {
		rest = nil
	}
	w.held, w.out = bytes.Clone(rest), out[:0]
	if len(out) == 0 {
		return nil
	}
	_, err := w.w.Write(out)
	return err
}

// JSON returns a writer for JSON, which passes it on with the characters that a terminal obeys
// spelled out as \u009b: what encoding/json leaves as it is. The JSON means what it meant. Each
// write has to be of whole characters, as those of an encoder are.
func JSON(w io.Writer) io.Writer { return jsonWriter{w} }

type jsonWriter struct{ w io.Writer }

func (j jsonWriter) Write(p []byte) (int, error) {
	if !plain(string(p)) {
		var out []byte
		for b := p; len(b) > 0; {
			r, n := utf8.DecodeRune(b)
			if unsafe(r) && r >= 0x20 {
				out = fmt.Appendf(out, `\u%04x`, r)
			} else {
				out = append(out, b[:n]...)
			}
			b = b[n:]
		}
		_, err := j.w.Write(out)
		return len(p), err
	}
	return j.w.Write(p)
}
