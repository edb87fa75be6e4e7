package safetensors

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// Entry is one tensor to write.
type Entry struct {
	Name  string
	DType DType
	Shape []int
	// Data writes the elements, row-major and little-endian. Their size must match the type and the shape. Write calls
	// it once, in the order of the file.
	Data func(w io.Writer) error
}

// Floats returns an entry that converts data to F64, F32, F16 or BF16 during the write. It rounds to 16 bits from
// float32, to nearest even.
func Floats[T Float](name string, dtype DType, shape []int, data []T) Entry {
	return Entry{Name: name, DType: dtype, Shape: shape, Data: func(w io.Writer) error {
		var buf []byte
		for left := data; len(left) > 0; {
			n := min(len(left), chunk/8)
			var err error
			if buf, err = encode(buf[:0], left[:n], dtype); err != nil {
				return err
			}
			if _, err := w.Write(buf); err != nil {
				return err
			}
			left = left[n:]
		}
		return nil
	}}
}

// Write writes a complete file to w, like the reference implementation: it sorts tensors by type, largest alignment
// first, and then by name, and pads the header with spaces to a multiple of eight bytes.
func Write(w io.Writer, metadata map[string]string, entries []Entry) error {
	entries = slices.Clone(entries)
	slices.SortStableFunc(entries, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(b.DType.rank(), a.DType.rank()), cmp.Compare(a.Name, b.Name))
	})
	head, sizes, err := header(metadata, entries)
	if err != nil {
		return fmt.Errorf("safetensors header: %w", err)
	}
	if _, err := w.Write(head); err != nil {
		return fmt.Errorf("safetensors header: %w", err)
	}
	for k, e := range entries {
		c := &counter{w: w, left: sizes[k]}
		if err := e.Data(c); err != nil {
			return fmt.Errorf("safetensors tensor %q: %w", e.Name, err)
		}
		if c.left != 0 {
			return fmt.Errorf("safetensors tensor %q: %d of %d bytes were not written", e.Name, c.left, sizes[k])
		}
	}
	return nil
}

// header returns the length with the JSON, and the size of every entry.
func header(metadata map[string]string, entries []Entry) ([]byte, []int64, error) {
	b := make([]byte, 8, 1024)
	b = append(b, '{')
	for k, v := range metadata {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return nil, nil, fmt.Errorf("metadata %q: %q is not UTF-8", k, v)
		}
	}
	if metadata != nil {
		b = append(appendJSON(append(appendJSON(b, metadataKey), ':'), metadata), ',')
	}
	sizes := make([]int64, len(entries))
	seen := map[string]bool{}
	at := int64(0)
	for k, e := range entries {
		size, err := ByteSize(e.DType, e.Shape)
		switch {
		case err != nil:
		case e.Name == metadataKey:
			err = errors.New("the name is reserved")
		case !utf8.ValidString(e.Name):
			err = errors.New("the name is not UTF-8")
		case seen[e.Name]:
			err = errors.New("the name stands twice")
		case len(e.Name) > maxName || len(entries) > MaxTensors:
			err = fmt.Errorf("a name of %d bytes, or one of %d tensors; at most %d and %d are read", len(e.Name),
				len(entries), maxName, MaxTensors)
		case at+size < at:
			err = errors.New("the file is too long")
		}
		if err != nil {
			return nil, nil, fmt.Errorf("tensor %q: %w", e.Name, err)
		}
		seen[e.Name], sizes[k] = true, size
		shape := e.Shape
		if shape == nil {
			shape = []int{}
		}
		b = append(appendJSON(b, e.Name), `:{"dtype":`...)
		b = append(appendJSON(b, e.DType), `,"shape":`...)
		b = append(appendJSON(b, shape), `,"data_offsets":`...)
		b = append(appendJSON(b, [2]int64{at, at + size}), '}', ',')
		at += size
	}
	b = append(bytes.TrimSuffix(b, []byte(",")), '}')
	for len(b)%8 != 0 {
		b = append(b, ' ')
	}
	if len(b)-8 > MaxHeader {
		return nil, nil, fmt.Errorf("%d bytes are more than the %d that are read", len(b)-8, MaxHeader)
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-8))
	return b, sizes, nil
}

// appendJSON appends v without the escapes that Go adds for HTML.
func appendJSON(b []byte, v any) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(fmt.Sprintf("safetensors: JSON of %T: %v", v, err)) // strings and integers alone
	}
	return append(b, bytes.TrimSuffix(buf.Bytes(), []byte("\n"))...)
}

// A counter writes at most left bytes to w.
type counter struct {
	w    io.Writer
	left int64
}

func (c *counter) Write(p []byte) (int, error) {
	if int64(len(p)) > c.left {
		return 0, fmt.Errorf("more data than type and shape say, by %d bytes at least", int64(len(p))-c.left)
	}
	n, err := c.w.Write(p)
	c.left -= int64(n)
	return n, err
}

// WriteFile replaces the file at path atomically: it writes a temporary file, syncs, renames, and syncs the directory.
// After a crash, the path has the old file or the new one.
func WriteFile(path string, metadata map[string]string, entries []Entry) (err error) {
	dir, err := files.OpenDir(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("safetensors file %s: %w", terminal.Name(path), err)
	}
	defer dir.Close()
	return WriteIn(dir, filepath.Base(path), metadata, entries)
}

// WriteIn does what WriteFile does inside dir. It follows no link out of dir.
func WriteIn(dir *os.Root, name string, metadata map[string]string, entries []Entry) error {
	err := files.Write(dir, name, func(f io.Writer) error {
		w := bufio.NewWriterSize(f, chunk)
		if err := Write(w, metadata, entries); err != nil {
			return err
		}
		return w.Flush()
	})
	if err == nil {
		err = files.Sync(dir)
	}
	if err != nil {
		return fmt.Errorf("safetensors file %s: %w", terminal.Name(filepath.Join(dir.Name(), name)), err)
	}
	return nil
}
