// Package safetensors reads and writes the safetensors format: a length, a JSON header that names every tensor with its
// element type, shape and byte range, and the tensors' bytes.
//
//	f, err := safetensors.Open(path)
//	err = f.ReadFloat32("model.norm.weight", dst, 0)
//
// The reader rejects the same files as the format's reference implementation, and names the tensor: duplicate keys,
// holes, overlaps, bytes of no tensor, and overflowing shapes. It checks lengths against the file's size before it
// allocates memory. Open reads only the header, and a read only the requested elements, so a rank reads only its part
// of a weight. No Go library does this: nlpodyssey/safetensors holds entire files in memory.
package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/tensor"
)

// File is an open safetensors file. Its methods may be called from several goroutines.
type File struct {
	name  string // for errors
	r     io.ReaderAt
	close func() error
	// written returns the bytes of the file on the disk; nil: unknown.
	written func() (int64, error)
	data    int64 // offset of the data in the file
	meta    map[string]string
	infos   map[string]Info
	names   []string
}

// Open reads and checks the header of the file at path. The caller closes it.
func Open(path string) (*File, error) {
	f, err := files.Open(path)
	if err != nil {
		return nil, fmt.Errorf("safetensors file: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("safetensors file: %w", err)
	}
	s, err := New(path, f, st.Size())
	if err != nil {
		f.Close()
		return nil, err
	}
	s.close = f.Close
	s.written = func() (int64, error) { return files.Written(f) }
	return s, nil
}

// New reads and checks the header of a file of size bytes from r. The name is for errors.
func New(name string, r io.ReaderAt, size int64) (*File, error) {
	name = terminal.Name(name)
	f := &File{name: name, r: r, close: func() error { return nil }, infos: map[string]Info{}}
	if err := f.open(size); err != nil {
		return nil, fmt.Errorf("safetensors file %s: %w", name, err)
	}
	return f, nil
}

func (f *File) open(size int64) error {
	var length [8]byte
	if size < 8 {
		return fmt.Errorf("%d bytes are too short for the header's length", size)
	}
	if err := readFull(f.r, length[:], 0); err != nil {
		return err
	}
	if err := files.Fetched(length[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > MaxHeader {
		return fmt.Errorf("the header claims %d bytes; at most %d are read", n, MaxHeader)
	}
	if int64(n) > size-8 {
		return fmt.Errorf("the header claims %d bytes of a file of %d", n, size)
	}
	raw := make([]byte, n)
	if err := readFull(f.r, raw, 8); err != nil {
		return err
	}
	f.data = 8 + int64(n)
	meta, infos, err := parseHeader(raw, size-f.data)
	if err != nil {
		return err
	}
	f.meta = meta
	for _, i := range infos {
		f.infos[i.Name] = i
		f.names = append(f.names, i.Name)
	}
	slices.Sort(f.names)
	return nil
}

// readFull fills p. A ReaderAt may return io.EOF with the last bytes.
func readFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("bytes %d to %d: %w", off, off+int64(len(p)), err)
}

// Name returns the file's name for errors.
func (f *File) Name() string { return f.name }

// Close closes a file from Open.
func (f *File) Close() error { return f.close() }

// Holes reports whether most of a large file was never written, as in a sparse file that claims far more data than it
// has.
func (f *File) Holes() bool {
	const much = 64 << 20
	size := f.data
	for _, i := range f.infos {
		size = max(size, f.data+i.End)
	}
	if f.written == nil || size < much {
		return false
	}
	n, err := f.written()
	return err == nil && n < size/2
}

// HeaderBytes returns the length of the header. The memory of an open file grows with it.
func (f *File) HeaderBytes() int64 { return f.data - 8 }

// Names returns the sorted names of the tensors. The caller must not change the slice.
func (f *File) Names() []string { return f.names }

// Metadata returns the header's metadata, or nil. The caller must not change the map.
func (f *File) Metadata() map[string]string { return f.meta }

// Info returns a tensor's entry in the header.
func (f *File) Info(name string) (Info, bool) {
	i, ok := f.infos[name]
	return i, ok
}

// chunk bounds the bytes that are read and converted at a time. It is a multiple of every element's size.
const chunk = 256 << 10

// ReadFloat32 fills dst with the elements of a tensor since element off, in row-major order. It converts F64, F32, F16,
// BF16, F8_E4M3 and F8_E5M2.
func (f *File) ReadFloat32(name string, dst []float32, off int64) error {
	return read(f, name, dst, off)
}

func read[T Float](f *File, name string, dst []T, off int64) error {
	i, err := f.span(name, off, int64(len(dst)))
	if err != nil {
		return err
	}
	size := i.DType.Bits() / 8
	var buf []byte
	if err := decode(dst[:0], nil, i.DType); err != nil { // rejects types with a size below one byte
		return f.wrap(name, err)
	}
	for len(dst) > 0 {
		n := min(int64(len(dst)), chunk/size)
		if buf == nil {
			buf = make([]byte, n*size)
		}
		if err := readFull(f.r, buf[:n*size], f.data+i.Begin+off*size); err != nil {
			return f.wrap(name, err)
		}
		if err := decode(dst[:n], buf, i.DType); err != nil {
			return f.wrap(name, err)
		}
		dst, off = dst[n:], off+n
	}
	return nil
}

// ReadInto fills a dense host view with the elements of a tensor since element off. A float32 or float64 view accepts
// the types of ReadFloat32. Other views accept only their own type.
func (f *File) ReadInto(name string, dst tensor.View, off int64) error {
	if !dst.IsDense() {
		return f.wrap(name, fmt.Errorf("read into %v, which has gaps", dst))
	}
	switch dst.DType() {
	case tensor.F32:
		return read(f, name, tensor.Data[float32](dst), off)
	case tensor.F64:
		return read(f, name, tensor.Data[float64](dst), off)
	}
	i, err := f.span(name, off, int64(dst.Size()))
	if err != nil {
		return err
	}
	if t := i.DType.Tensor(); t != dst.DType() {
		return f.wrap(name, fmt.Errorf("elements of type %s do not go into a view of %s", i.DType, dst.DType()))
	}
	size := dst.DType().Size()
	b := tensor.Bytes(dst)
	if err := f.ReadBytes(name, b, off*int64(size)); err != nil {
		return err
	}
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 { // a big-endian machine
		for ; len(b) > 0; b = b[size:] {
			slices.Reverse(b[:size])
		}
	}
	return nil
}

// ReadBytes fills dst with the raw bytes of a tensor of any type since byte off.
func (f *File) ReadBytes(name string, dst []byte, off int64) error {
	i, ok := f.infos[name]
	if !ok {
		return f.wrap(name, errors.New("not in the file"))
	}
	if n := int64(len(dst)); off < 0 || n > i.Bytes() || off > i.Bytes()-n {
		return f.wrap(name, fmt.Errorf("bytes %d to %d of %d asked for", off, off+n, i.Bytes()))
	}
	if err := readFull(f.r, dst, f.data+i.Begin+off); err != nil {
		return f.wrap(name, err)
	}
	return nil
}

// span returns the info of a tensor, and checks that it has the elements off to off+n.
func (f *File) span(name string, off, n int64) (Info, error) {
	i, ok := f.infos[name]
	if !ok {
		return i, f.wrap(name, errors.New("not in the file"))
	}
	if size := i.Elements(); off < 0 || n > size || off > size-n {
		return i, f.wrap(name, fmt.Errorf("elements %d to %d of %d (shape %v) asked for", off, off+n, size, i.Shape))
	}
	return i, nil
}

func (f *File) wrap(name string, err error) error {
	return fmt.Errorf("safetensors file %s: tensor %q: %w", f.name, name, err)
}
