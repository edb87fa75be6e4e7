package files

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/terminal"
)

// readFlags do not block. Without O_NONBLOCK, opening a pipe would wait for a writer.
const readFlags = os.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY

// ErrIrregular is the cause of an error for a pipe, device, socket or directory.
var ErrIrregular = errors.New("not a regular file")

// ErrTooLong is the cause of an error for a file that exceeds its limit.
var ErrTooLong = errors.New("too long")

// Open opens a regular file to read. It rejects anything else without blocking.
func Open(path string) (*os.File, error) {
	st, err := os.Stat(path)
	if err == nil {
		err = check(path, st)
	}
	if err != nil { // before the open, which may have effects on a device
		return nil, shown(err)
	}
	f, err := os.OpenFile(path, readFlags, 0)
	return regular(path, f, err)
}

// OpenIn opens a regular file in root. It follows no link out of root.
func OpenIn(root *os.Root, name string) (*os.File, error) {
	st, err := root.Stat(name)
	if err == nil {
		err = check(name, st)
	}
	if err != nil {
		return nil, lead(root, name, err)
	}
	f, err := root.OpenFile(name, readFlags, 0)
	f, err = regular(name, f, err)
	return f, lead(root, name, err)
}

// regular returns f if it is a regular file. It checks again after the open, since the name may have changed.
func regular(path string, f *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, shown(err)
	}
	st, err := f.Stat()
	if err == nil {
		err = check(path, st)
	}
	if err != nil {
		f.Close()
		return nil, shown(err)
	}
	return f, nil
}

func check(path string, st fs.FileInfo) error {
	if st.Mode().IsRegular() {
		return nil
	}
	return &fs.PathError{Op: "open", Path: path, Err: fmt.Errorf("it is %s, %w", kind(st.Mode()), ErrIrregular)}
}

// kind names the type of a file, with the fix.
func kind(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe (copy what comes out of it into a file)"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "none that holds bytes"
}

func shown(err error) error {
	if pe, ok := err.(*fs.PathError); ok {
		return &fs.PathError{Op: pe.Op, Path: terminal.Name(pe.Path), Err: pe.Err}
	}
	return err
}

// Stat does what os.Stat does. Its errors have the printable form of the path.
func Stat(path string) (fs.FileInfo, error) {
	st, err := os.Stat(path)
	return st, shown(err)
}

// Empty reports whether a directory is empty or missing.
func Empty(path string) (bool, error) {
	left, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return len(left) == 0, shown(err)
}

// Written returns the number of bytes of a file on the disk, at most its size. The others are holes.
func Written(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, err
	}
	return min(st.Blocks*512, st.Size), nil
}

// Read returns the content of a file of at most limit bytes.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return All(f, limit)
}

// ReadIn returns the content of a file in root, of at most limit bytes. It follows no link out of root.
func ReadIn(root *os.Root, name string, limit int64) ([]byte, error) {
	f, err := OpenIn(root, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return All(f, limit)
}

// Readable is a file that is open to read, as an os.File is.
type Readable interface {
	io.Reader
	// Name returns its path, for errors.
	Name() string
	// Stat returns its size and kind.
	Stat() (fs.FileInfo, error)
}

// All returns the rest of an open file, at most limit bytes.
func All(f Readable, limit int64) ([]byte, error) {
	fail := func(err error) error {
		return &fs.PathError{Op: "read", Path: terminal.Name(f.Name()), Err: err}
	}
	if st, err := f.Stat(); err != nil {
		return nil, shown(err)
	} else if st.Size() > limit {
		return nil, fail(fmt.Errorf("%d bytes are %w; at most %d are read", st.Size(), ErrTooLong, limit))
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1)) // the file may grow, and files in /proc have size 0
	if err != nil {
		return nil, shown(err)
	}
	if int64(len(data)) > limit {
		return nil, fail(fmt.Errorf("it is %w; at most %d bytes are read", ErrTooLong, limit))
	}
	return data, nil
}

// Glob returns the sorted paths that a pattern matches: the syntax of path.Match, {a,b}, and ** for any number of
// directories. As in a shell, wildcards do not match names that begin with a dot. ** does not follow symbolic links,
// which may form a loop. A directory that cannot be read is an error.
func Glob(pattern string) ([]string, error) {
	opts := []doublestar.GlobOption{doublestar.WithNoHidden(), doublestar.WithFailOnIOErrors()}
	if strings.Contains(pattern, "**") {
		opts = append(opts, doublestar.WithNoFollow())
	}
	paths, err := doublestar.FilepathGlob(pattern, opts...)
	slices.Sort(paths)
	return paths, err
}

// Modest rejects JSON of more than most values and keys, since a value of two bytes takes a hundred bytes after
// decoding. It looks only at brackets, commas and colons, and leaves the validation to the decoder.
func Modest(json []byte, most int) error {
	n, inside := 1, false
	for i := 0; i < len(json); i++ {
		switch c := json[i]; {
		case inside && c == '\\':
			i++
		case c == '"':
			inside = !inside
		case inside:
		case c == ',' || c == ':' || c == '[' || c == '{':
			n++
		}
	}
	if n > most {
		return fmt.Errorf("it has %d values; at most %d are read", n, most)
	}
	return nil
}

// pointer is the prefix of a git-lfs pointer, which replaces a file that git-lfs has not fetched.
var pointer = []byte("version https://git-lfs.github.com/spec/")

// Fetched returns an error if a file that begins with these bytes is a git-lfs pointer.
func Fetched(begin []byte) error {
	if n := min(len(begin), len(pointer)); n >= 8 && bytes.Equal(begin[:n], pointer[:n]) {
		return errors.New("it is a git-lfs pointer, not the file: run git lfs pull in its directory")
	}
	return nil
}
