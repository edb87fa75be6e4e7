// Package files is the one way in which cprun opens files to read, and makes those of a run.
//
// What is read may be anybody's: Open refuses all except regular files without waiting for them, and
// Read has a bound. What is written lies in a directory that is held open as an os.Root, so that no
// link in it leads elsewhere; files get names of their own that did not exist, and their real name
// when they are whole.
package files

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/terminal"
)

// The modes of new files and directories; the umask may take bits away, and nothing adds any.
const (
	dirMode  = 0o755
	fileMode = 0o644
)

// Make makes a directory if it is missing, and opens it.
func Make(path string) (*os.Root, error) {
	if err := os.MkdirAll(path, dirMode); err != nil {
		return nil, shown(err)
	}
	return OpenDir(path)
}

// OpenDir opens an existing directory, and refuses anything else at once.
func OpenDir(path string) (*os.Root, error) {
	st, err := os.Stat(path)
	if err == nil && !st.IsDir() { // a pipe would be waited for
		err = &fs.PathError{Op: "open", Path: path, Err: unix.ENOTDIR}
	}
	if err != nil {
		return nil, shown(err)
	}
	root, err := os.OpenRoot(path)
	return root, shown(err)
}

// OpenDirIn opens a directory in another, which no link leads out of.
func OpenDirIn(root *os.Root, name string) (*os.Root, error) {
	st, err := root.Stat(name)
	if err == nil && !st.IsDir() {
		err = &fs.PathError{Op: "open", Path: name, Err: unix.ENOTDIR}
	}
	if err != nil {
		return nil, lead(root, name, err)
	}
	inner, err := root.OpenRoot(name)
	return inner, lead(root, name, err)
}

// MakeNew makes a directory that was not there, and opens it.
func MakeNew(path string) (*os.Root, error) {
	if err := os.Mkdir(path, dirMode); err != nil {
		return nil, shown(err)
	}
	return OpenDir(path)
}

// Sub makes a directory in another if it is missing, and opens it. No link leads out of it.
func Sub(root *os.Root, name string) (*os.Root, error) { return sub(root, name, dirMode) }

// Private makes and opens a directory as Sub does, one that no one but the user may read.
func Private(root *os.Root, name string) (*os.Root, error) { return sub(root, name, 0o700) }

func sub(root *os.Root, name string, mode fs.FileMode) (*os.Root, error) {
	if err := root.MkdirAll(name, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, lead(root, name, err)
	}
	return OpenDirIn(root, name)
}

// A Draft is a new file that does not have its name yet.
type Draft struct {
	*os.File
	root       *os.Root
	made       fs.FileInfo // tells the file from others
	temp, name string
}

func temporary(name string) string {
	var b [8]byte
	rand.Read(b[:])
	return fmt.Sprintf("%s.tmp-%x", name, b)
}

// Create begins a file. It has a random name, that did not exist, until Commit. A name that is there
// all the same was made by the same request, sent twice by a network file system: another is taken.
func Create(root *os.Root, name string) (*Draft, error) {
	d, err := CreateAs(root, temporary(name), name)
	if errors.Is(err, fs.ErrExist) {
		d, err = CreateAs(root, temporary(name), name)
	}
	return d, err
}

// CreateAs begins a file that has a name of the caller's until Commit. That name must be free.
func CreateAs(root *os.Root, temp, name string) (*Draft, error) {
	f, err := root.OpenFile(temp, os.O_RDWR|os.O_APPEND|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return nil, lead(root, temp, err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(lead(root, temp, err), f.Close(), root.Remove(temp))
	}
	return &Draft{File: f, root: root, made: st, temp: temp, name: name}, nil
}

// Rename gives the file its name, in place of whatever had it, and leaves it open.
func (d *Draft) Rename() error {
	err := rename(d.root, d.temp, d.name, d.made)
	if err == nil {
		d.temp = ""
	}
	return lead(d.root, d.name, err)
}

// Commit waits until the file is on the disk, closes it and gives it its name. A network file system
// may tell of an error of a write as late as in either of the first two.
func (d *Draft) Commit() error {
	err := d.Sync()
	if err = errors.Join(err, d.Close()); err != nil {
		return errors.Join(lead(d.root, d.name, err), d.Discard())
	}
	if err := d.Rename(); err != nil {
		return errors.Join(err, d.Discard())
	}
	return nil
}

// Discard removes a file that has no name yet, and leaves a named one.
func (d *Draft) Discard() error {
	if d.temp == "" {
		return nil
	}
	d.Close() // it may be closed
	err := d.root.Remove(d.temp)
	d.temp = ""
	return lead(d.root, d.name, err)
}

// Write replaces a file in a directory by one that holds what f writes, so that a reader sees the
// old or the new one.
func Write(root *os.Root, name string, f func(d *Draft) error) error {
	d, err := Create(root, name)
	if err != nil {
		return err
	}
	if err := f(d); err != nil {
		return errors.Join(err, d.Discard())
	}
	return d.Commit()
}

// WriteDir makes a directory that holds what f puts into it, whole or not at all. An empty one of its
// name makes way, and so does nothing else.
func WriteDir(root *os.Root, name string, f func(dir *os.Root) error) error {
	temp := "." + temporary(name)
	if err := root.Mkdir(temp, dirMode); err != nil {
		return lead(root, name, err)
	}
	err := fill(root, temp, f)
	if err == nil {
		if err = root.Remove(name); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		if err == nil {
			err = root.Rename(temp, name)
		}
		err = lead(root, name, err)
	}
	if err != nil {
		return errors.Join(err, root.RemoveAll(temp))
	}
	return Sync(root)
}

// fill fills a directory by f, and waits until its names are on the disk.
func fill(root *os.Root, name string, f func(dir *os.Root) error) error {
	dir, err := root.OpenRoot(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := f(dir); err != nil {
		return err
	}
	return Sync(dir)
}

// WriteTo replaces a file as Write does, at a path that a user has named. A link there is replaced,
// and not followed; what is no file stays.
func WriteTo(path string, f func(d *Draft) error) error {
	if st, err := os.Lstat(path); err == nil && !st.Mode().IsRegular() && st.Mode()&fs.ModeSymlink == 0 {
		return check(terminal.Name(path), st)
	}
	root, err := OpenDir(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer root.Close()
	return Write(root, filepath.Base(path), f)
}

// Append opens a private file in a directory to append to, and makes it where it is not there. A
// link in its place is refused, and so is a file that has another name as well.
func Append(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ELOOP) {
		err = &fs.PathError{Op: "open", Path: name, Err: ErrIrregular}
	}
	f, err = regular(name, f, err)
	if err != nil {
		return nil, lead(root, name, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err == nil && st.Nlink > 1 {
		f.Close()
		return nil, lead(root, name, &fs.PathError{Op: "open", Path: name,
			Err: errors.New("it has another name too, and would change there; remove it")})
	}
	return f, nil
}

// Update opens a regular file in a directory to read and to change, such as to lock it: a network
// file system locks a file for one process alone only if it may write.
func Update(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK, 0)
	f, err = regular(name, f, err)
	return f, lead(root, name, err)
}

// Lockable opens a file as Update does, and makes a missing one.
func Lockable(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_CREATE|os.O_RDWR|unix.O_NONBLOCK, fileMode)
	f, err = regular(name, f, err)
	return f, lead(root, name, err)
}

// Sync waits until the names in a directory are on the disk, which a rename alone does not.
func Sync(root *os.Root) error {
	d, err := root.Open(".")
	if err != nil {
		return lead(root, ".", err)
	}
	defer d.Close()
	return d.Sync()
}

// escapes is package os's text for a link that leads out of a root.
const escapes = "path escapes from parent"

// lead puts the directory before the name in an error of a root, and says what to do about a link
// that leads out of it.
func lead(root *os.Root, name string, err error) error {
	if err == nil {
		return nil
	}
	if le := (*os.LinkError)(nil); errors.As(err, &le) {
		err = le.Err
	} else if pe := (*fs.PathError)(nil); !errors.As(err, &pe) {
		return err // it has words of its own
	}
	for pe := (*fs.PathError)(nil); errors.As(err, &pe); {
		err = pe.Err
	}
	if err.Error() == escapes {
		err = errors.New("it is, or lies behind, a link that leads out of the directory, which is not followed; put " +
			"a directory or a file there")
	}
	return &fs.PathError{Op: "open", Path: terminal.Name(filepath.Join(root.Name(), name)), Err: err}
}

// Refresh makes a network file system read a directory again, so that earlier changes by other hosts become
// visible. Opening a directory by its path asks the server. A look-up below an open directory may be
// answered from a cache of names, or of missing names, that is seconds old. If the handle is stale, Refresh
// returns a new one and closes the old one. made identifies the directory: another one that now has its
// path is refused.
func Refresh(root *os.Root, made fs.FileInfo) (*os.Root, error) {
	_, stale := root.Stat(".")
	again, err := reopen(root.Name(), made)
	if err == nil && stale != nil {
		root.Close()
		return again, nil
	}
	if err == nil {
		again.Close()
	}
	return root, lead(root, ".", stale)
}

// Again opens an open directory once more.
func Again(root *os.Root) (*os.Root, error) {
	made, err := root.Stat(".")
	if err != nil {
		return nil, lead(root, ".", err)
	}
	again, err := reopen(root.Name(), made)
	if err != nil { // it has another path by now, or none
		again, err = root.OpenRoot(".")
	}
	return again, lead(root, ".", err)
}

// reopen opens a path if it still leads to the directory that made describes.
func reopen(path string, made fs.FileInfo) (*os.Root, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	if st, err := root.Stat("."); err != nil || !os.SameFile(st, made) {
		return nil, errors.Join(fs.ErrNotExist, err, root.Close())
	}
	return root, nil
}

// Rename gives a file or a directory another name. A network file system may send a request twice and
// answer the second time that the old name is gone. That is no error if the file has the new name.
func Rename(root *os.Root, from, to string) error {
	made, err := root.Lstat(from)
	if err == nil {
		err = rename(root, from, to, made)
	}
	return lead(root, from, err)
}

func rename(root *os.Root, from, to string, made fs.FileInfo) error {
	err := root.Rename(from, to)
	if errors.Is(err, fs.ErrNotExist) {
		if st, there := root.Lstat(to); there == nil && os.SameFile(st, made) {
			return nil
		}
	}
	return err
}

// Exclusive makes a file that was not there, with its content, and waits until it is on the disk. Of
// several that try, on any host, one succeeds. What an error leaves may be there without its content.
func Exclusive(root *os.Root, name string, data []byte) error {
	return exclusive(root, name, data, fileMode)
}

// Secret makes a file as Exclusive does, with mode 0600 whatever the umask is.
func Secret(root *os.Root, name string, data []byte) error {
	const mode = 0o600
	if err := exclusive(root, name, data, mode); err != nil {
		return err
	}
	return lead(root, name, root.Chmod(name, mode))
}

func exclusive(root *os.Root, name string, data []byte, mode fs.FileMode) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return lead(root, name, err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return lead(root, name, errors.Join(err, f.Close()))
}

// Free returns the bytes that a user may still write to the file system of a path, or of the nearest
// directory above it that is there.
func Free(path string) (int64, error) {
	st, err := statfs(path)
	if err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: terminal.Name(path), Err: err}
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// statfs describes the file system of a path, or of the nearest directory above it that is there.
func statfs(path string) (st unix.Statfs_t, err error) {
	for {
		err = unix.Statfs(path, &st)
		up := filepath.Dir(path)
		if !errors.Is(err, unix.ENOENT) || up == path {
			return st, err
		}
		path = up
	}
}

// Own makes and opens a directory in another that only this user may enter.
func Own(root *os.Root, name string) (*os.Root, error) {
	if err := root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, lead(root, name, err)
	}
	return Owned(root, name)
}

// Owned opens a directory in another that is there. One that is another user's, or open to others, is
// refused: they may write beside this one.
func Owned(root *os.Root, name string) (*os.Root, error) {
	st, err := root.Lstat(name)
	if err != nil {
		return nil, lead(root, name, err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !st.IsDir() || st.Mode().Perm()&0o077 != 0 || ok && int(sys.Uid) != os.Geteuid() {
		return nil, lead(root, name, &fs.PathError{Op: "open", Path: name,
			Err: fmt.Errorf("it is %v, not a directory that this user alone may enter; remove it", st.Mode())})
	}
	return OpenDirIn(root, name)
}
