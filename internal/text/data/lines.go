package data

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// kindJSON names files with records in JSON.
const kindJSON = "jsonl"

// These extensions decide: JSON, and text.
var (
	jsonExts = []string{".jsonl", ".ndjson", ".jsonlines", ".json"}
	textExts = []string{".txt", ".text", ".md", ".rst", ".tex"}
)

// FileKind returns the kind of a file: tokens, jsonl, parquet, arrow or text; "" for a companion of another file. The
// extension decides, in any case. A file of another or no extension is jsonl if its first line is a record.
func FileKind(path string) string {
	name, compressed := unpacked(path)
	switch ext := strings.ToLower(filepath.Ext(name)); {
	case slices.Contains(jsonExts, ext):
		return kindJSON
	case ext == ".parquet" && !compressed, ext == ".arrow" && !compressed:
		return ext[1:]
	case ext == ".bin" && !compressed:
		return "tokens"
	case ext == ".idx" && !compressed:
		return ""
	case !slices.Contains(textExts, ext) && beginsWithRecord(path):
		return kindJSON
	}
	return "text"
}

// guessed returns a line for the user about files whose extension does not tell their kind; "": it does.
func guessed(path string) string {
	name, _ := unpacked(path)
	ext, kind := strings.ToLower(filepath.Ext(name)), FileKind(path)
	files := fmt.Sprintf("files that end in %s", ext)
	if ext == "" {
		files = "files without an extension"
	}
	switch known := slices.Contains(textExts, ext); {
	case kind == "text" && known && beginsWithRecord(path):
		return fmt.Sprintf("%s begin with a record of JSON and are read as text; name them .jsonl to read records", files)
	case kind == "text" && !known:
		return files + " are read as text, since they do not begin with a record of JSON"
	case kind == kindJSON && !slices.Contains(jsonExts, ext):
		return files + " are read as JSON records, since they begin with one"
	}
	return ""
}

// beginsWithRecord reports whether the first line of a file that may be compressed, or the first element of its array,
// is a record. It is false for a file that cannot be read.
func beginsWithRecord(path string) bool {
	f, size, err := openSized(path)
	if err != nil {
		return false
	}
	defer f.Close()
	r, free, err := unpack(f, path, size)
	if err != nil {
		return false
	}
	defer free()
	in := bufio.NewReaderSize(r, 4096)
	head, _ := in.Peek(512)
	if !messagesBegin.Match(bytes.TrimSpace(bytes.TrimPrefix(head, []byte(byteOrderMark)))) {
		return false
	}
	for line, err := range (&recordFile{in: in}).values {
		if err != nil {
			return false
		}
		_, _, err = fields(line, "", nil)
		return err == nil
	}
	return false
}

// A recordFile yields records as lines of JSON.
type recordFile struct {
	each iter.Seq2[[]byte, error]
	unit string // line or record
	n    int    // the number of the last one
	in   *bufio.Reader
}

// recordsOf returns the records of a file, and a function that frees it.
func recordsOf(f *os.File, path string, size int64) (*recordFile, func(), error) {
	if FileKind(path) != kindJSON {
		r := &recordFile{unit: "record"}
		r.each = func(yield func([]byte, error) bool) {
			for line, err := range rows(f, path, size) {
				if r.n++; !yield(line, err) {
					return
				}
			}
		}
		return r, func() {}, nil
	}
	u, free, err := unpack(f, path, size)
	if err != nil {
		return nil, nil, err
	}
	r := &recordFile{unit: "line", in: bufio.NewReaderSize(u, 256<<10)}
	r.each = r.lines
	name, _ := unpacked(path)
	if ext := strings.ToLower(filepath.Ext(name)); ext == ".json" || !slices.Contains(jsonExts, ext) {
		r.unit, r.each = "record", r.values
	}
	return r, free, nil
}

// maxLine bounds a record.
const maxLine = 64 << 20

var errLong = fmt.Errorf(
	"longer than %d bytes, the most of one record; split it, or write it as a text file (.txt) or as tokens (.bin)",
	maxLine)

// lines yields the lines of a file. It skips blank ones quickly: a small compressed file may have billions.
func (r *recordFile) lines(yield func([]byte, error) bool) {
	r.n = 1
	for {
		blank, err := r.skipSpace()
		if err == io.EOF {
			return
		}
		if r.n += blank; err != nil {
			yield(nil, err)
			return
		}
		line, err := readLine(r.in)
		if err != nil && err != io.EOF {
			yield(nil, err)
			return
		}
		if !yield(line, nil) || err == io.EOF {
			return
		}
		r.n++
	}
}

// skipSpace skips white space of JSON, and returns its ends of lines.
func (r *recordFile) skipSpace() (lines int, err error) {
	for {
		if _, err := r.in.Peek(1); err != nil {
			return lines, err
		}
		b, _ := r.in.Peek(r.in.Buffered())
		n := 0
		for n < len(b) && (b[n] == '\n' || b[n] == ' ' || b[n] == '\r' || b[n] == '\t') {
			if b[n] == '\n' {
				lines++
			}
			n++
		}
		_, _ = r.in.Discard(n)
		if n < len(b) {
			return lines, nil
		}
	}
}

// readLine reads a line with its end. io.EOF comes with the last line.
func readLine(r *bufio.Reader) (line []byte, err error) {
	for {
		b, err := r.ReadSlice('\n')
		if len(line)+len(b) > maxLine {
			return nil, errLong
		}
		line = append(line, b...)
		if err != bufio.ErrBufferFull {
			return line, err
		}
	}
}

// values yields the objects of a file of JSON, in an array or one after the other.
func (r *recordFile) values(yield func([]byte, error) bool) {
	if mark, _ := r.in.Peek(len(byteOrderMark)); string(mark) == byteOrderMark {
		_, _ = r.in.Discard(len(mark))
	}
	array, err := r.next('[')
	for r.n = 1; ; r.n++ {
		if err != nil {
		} else if array {
			if err = r.between(); err == io.EOF {
				return
			}
		} else if _, err = r.skipSpace(); err == io.EOF {
			return
		}
		var value []byte
		if err == nil {
			value, err = r.value()
		}
		if err == io.EOF { // of a file without a value
			return
		}
		if !yield(value, err) || err != nil {
			return
		}
	}
}

// between skips to the next value of an array; io.EOF after the last.
func (r *recordFile) between() error {
	end, err := r.next(']')
	comma := r.n == 1
	switch {
	case err == nil && end:
		if _, err = r.skipSpace(); err == nil {
			err = errors.New("something follows the array")
		}
		return err
	case err == nil && !comma:
		comma, err = r.next(',')
	}
	if err == nil && !comma {
		err = errors.New("no comma or ] after a value of the array")
	}
	if err == nil {
		_, err = r.skipSpace()
	}
	if err == io.EOF {
		err = errors.New("the array is cut short")
	}
	return err
}

// next skips white space, and then the wanted byte if it follows.
func (r *recordFile) next(want byte) (bool, error) {
	_, err := r.skipSpace()
	if err != nil {
		return false, err
	}
	b, _ := r.in.Peek(1)
	if b[0] == want {
		_, _ = r.in.Discard(1)
	}
	return b[0] == want, nil
}

// value reads an object to its last brace. The parser of records checks what lies inside.
func (r *recordFile) value() (value []byte, err error) {
	depth, quoted, escaped := 0, false, false
	for {
		c, err := r.in.ReadByte()
		if err == io.EOF {
			return nil, io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		switch value = append(value, c); {
		case len(value) == 1 && c != '{':
			return nil, fmt.Errorf("not a JSON object, but %q", c)
		case len(value) > maxLine:
			return nil, errLong
		case escaped:
			escaped = false
		case quoted:
			escaped, quoted = c == '\\', c != '"'
		case c == '"':
			quoted = true
		case c == '{':
			depth++
		case c == '}':
			if depth--; depth == 0 {
				return value, nil
			}
		}
	}
}
