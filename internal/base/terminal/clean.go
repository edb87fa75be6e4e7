// Package terminal makes untrusted text safe for terminals and logs. File names, config values and output of other
// processes may contain control characters, which move the cursor, redefine keys or reverse the reading order, and may
// have any length.
//
//	fmt.Fprintln(w, terminal.Message(fmt.Errorf("open %s: %w", terminal.Name(path), err)))
//
// All output of cprun passes through Text, Message or a Writer when it is printed. Names in it pass through Name when
// the text is composed, so that a line break in a name is visible.
package terminal

import (
	"bytes"
	"fmt"
	"io"
	"unicode"
	"unicode/utf8"
)

// Line returns a safe copy of a line. It removes escape sequences, control characters except tabs, and characters that
// reverse the reading order. Bytes that are not UTF-8 become U+FFFD.
func Line(s string) string {
	out, _ := clean(make([]byte, 0, len(s)), []byte(s), mode{end: true})
	return string(out)
}

// Text does what Line does and keeps line breaks.
func Text(s string) string {
	if plain(s) {
		return s
	}
	out, _ := clean(make([]byte, 0, len(s)), []byte(s), mode{end: true, lines: true})
	return string(out)
}

// plain reports whether there is nothing to clean, the usual case.
func plain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < 0x20 && c != '\n' && c != '\t' || c >= 0x7f {
			return false
		}
	}
	return true
}

// mode selects the work of clean.
type mode struct {
	lines bool // keep line breaks
	end   bool // b is the end of the text: clean an unfinished sequence also
}

// clean appends the safe part of b to out. rest is an unfinished sequence at the end of b.
func clean(out, b []byte, m mode) (_, rest []byte) {
	for len(b) > 0 {
		if b[0] == 0x1b {
			n, whole := escape(b)
			if !whole && !m.end {
				return out, b
			}
			b = b[n:]
			continue
		}
		if !m.end && !utf8.FullRune(b) {
			return out, b
		}
		r, n := utf8.DecodeRune(b)
		switch {
		case r == '\t' || r == '\n' && m.lines:
			out = append(out, b[0])
		case r == utf8.RuneError && n == 1:
			out = utf8.AppendRune(out, utf8.RuneError)
		case unsafe(r):
		default:
			out = append(out, b[:n]...)
		}
		b = b[n:]
	}
	return out, nil
}

// unsafe reports whether r is a control character, or changes the reading order or the number of lines.
func unsafe(r rune) bool {
	return unicode.IsControl(r) || reverses(r) || r == 0x2028 || r == 0x2029
}

// reverses reports whether r is a bidirectional control character (CVE-2021-42574).
func reverses(r rune) bool {
	return r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 || r == 0x200e || r == 0x200f || r == 0x061c
}

// escape returns the length of the escape sequence at the start of b (ECMA-48): a control sequence, a string such as an
// operating system command, or a short sequence. A sequence ends at the end of a line. whole is false if b ends inside
// the sequence.
func escape(b []byte) (n int, whole bool) {
	if len(b) < 2 {
		return len(b), false
	}
	switch b[1] {
	case '[':
		for i := 2; i < len(b); i++ {
			if b[i] >= 0x40 && b[i] <= 0x7e {
				return i + 1, true
			}
			if b[i] < 0x20 || b[i] > 0x7e {
				return i, true // not a control sequence: keep the rest
			}
		}
		return len(b), false
	case ']', 'P', '_', '^', 'X':
		for i := 2; i < len(b); i++ {
			switch {
			case b[i] == '\n':
				return i, true
			case b[i] == 0x07:
				return i + 1, true
			case b[i] == 0x1b && i+1 < len(b) && b[i+1] == '\\':
				return i + 2, true
			}
		}
		return len(b), false
	}
	if b[1] >= 0x20 && b[1] <= 0x2f { // an intermediate and a final byte, as in the selection of a character set
		if len(b) == 2 {
			return 2, false
		}
		if b[2] >= 0x20 {
			return 3, true
		}
		return 2, true
	}
	if b[1] >= 0x20 && b[1] < 0x80 {
		return 2, true
	}
	return 1, true
}

// maxHeld bounds the unfinished sequence that a Writer keeps.
const maxHeld = 4 << 10

// Writer cleans its input as Text does. A sequence may span several writes. One goroutine may use it.
type Writer struct {
	w    io.Writer
	held []byte // an unfinished sequence
	out  []byte
}

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write cleans and writes p. It returns the length of p, not of the cleaned text.
func (w *Writer) Write(p []byte) (int, error) {
	return len(p), w.pass(p, false)
}

// Flush cleans and writes an unfinished rest.
func (w *Writer) Flush() error { return w.pass(nil, true) }

// pass cleans and writes the held rest and p.
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

// JSON returns a writer that escapes the control characters that encoding/json does not, such as \u009b. The JSON keeps
// its meaning. Each write must consist of complete characters, as the writes of an encoder do.
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
