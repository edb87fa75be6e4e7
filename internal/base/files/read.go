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

// readFlags do not wait: opening a pipe would, for a writer.
const readFlags = os.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY

// ErrIrregular is the cause if a name is a pipe's, a device's, a socket's or a directory's.
var ErrIrregular = errors.New("not a regular file")

// ErrTooLong is the cause if a file exceeds its limit.
var ErrTooLong = errors.New("too long")

// Open opens a regular file to read, and refuses anything else at once.
func Open(path string) (*os.File, error) {
	st, err := os.Stat(path)
	if err == nil {
		err = check(path, st)
	}
	if err != nil { // a device may do something when it is opened
		return nil, shown(err)
	}
	f, err := os.OpenFile(path, readFlags, 0)
	return regular(path, f, err)
}

// OpenIn opens a regular file in a directory, which no link leads out of.
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

// regular is f, if it still is a regular file now that no one can put another in its place.
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

// Stat returns what a path is of. Its errors show the path as a terminal may.
func Stat(path string) (fs.FileInfo, error) {
	st, err := os.Stat(path)
	return st, shown(err)
}

// Empty reports whether a directory has nothing in it, or is not there.
func Empty(path string) (bool, error) {
	left, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return len(left) == 0, shown(err)
}

// Written returns the bytes of a file that are on the disk, at most those that it has. The others are
// holes, which no one wrote.
func Written(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, err
	}
	return min(st.Blocks*512, st.Size), nil
}

// Read returns a whole file of at most limit bytes.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return All(f, limit)
}

// ReadIn returns a whole file in a directory, which no link leads out of.
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
	data, err := io.ReadAll(io.LimitReader(f, limit+1)) // it may grow, and files of /proc have no size
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

// Modest refuses JSON of more than most values and keys: decoded, a value of two bytes takes a
// hundred. It looks at brackets, commas and colons alone; that the rest is JSON, its decoder finds.
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

// pointer begins what git-lfs puts in the place of a file that it has not fetched.
var pointer = []byte("version https://git-lfs.github.com/spec/")

// Fetched returns an error if a file that begins with these bytes is a pointer of git-lfs.
func Fetched(begin []byte) error {
	if n := min(len(begin), len(pointer)); n >= 8 && bytes.Equal(begin[:n], pointer[:n]) {
		return errors.New("it is a git-lfs pointer, not the file: run git lfs pull in its directory")
	}
	return nil
}
