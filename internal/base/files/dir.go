// Package files opens all files that cprun reads, and makes the files of a run.
//
//	data, err := files.Read(path, 1<<20) // at most 1 MiB
//	dir, err := files.Make(runDirectory)
//	err = files.Write(dir, "plan.json", func(w io.Writer) error { … })
//
// Inputs may be malicious: Open rejects everything except regular files without blocking, and Read has a limit. Output
// goes to a directory that is open as an os.Root, so that no link leads out of it. A new file has a temporary name
// until it is complete.
package files

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/terminal"
)

// The modes of new files and directories, before the umask.
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

// OpenDir opens an existing directory. It rejects anything else without blocking.
func OpenDir(path string) (*os.Root, error) {
	st, err := os.Stat(path)
	if err == nil && !st.IsDir() { // opening a pipe would block
		err = &fs.PathError{Op: "open", Path: path, Err: unix.ENOTDIR}
	}
	if err != nil {
		return nil, shown(err)
	}
	root, err := os.OpenRoot(path)
	return root, shown(err)
}

// OpenDirIn opens a directory in root. It follows no link out of root.
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

// MakeNew makes and opens a directory. It fails if the path exists.
func MakeNew(path string) (*os.Root, error) {
	if err := os.Mkdir(path, dirMode); err != nil {
		return nil, shown(err)
	}
	return OpenDir(path)
}

// Sub makes a directory in root if it is missing, and opens it. It follows no link out of root.
func Sub(root *os.Root, name string) (*os.Root, error) { return sub(root, name, dirMode) }

// Private does what Sub does. Only the user may read a new directory.
func Private(root *os.Root, name string) (*os.Root, error) { return sub(root, name, 0o700) }

func sub(root *os.Root, name string, mode fs.FileMode) (*os.Root, error) {
	if err := root.MkdirAll(name, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, lead(root, name, err)
	}
	return OpenDirIn(root, name)
}

// A Draft is a new file that has a temporary name.
type Draft struct {
	*os.File
	root       *os.Root
	made       fs.FileInfo // identifies the file
	temp, name string
}

func temporary(name string) string {
	var b [8]byte
	rand.Read(b[:])
	return fmt.Sprintf("%s.tmp-%x", name, b)
}

// Create creates a file with a random name, which Commit renames. If the random name exists, a network file system has
// sent the request twice, and Create tries another name.
func Create(root *os.Root, name string) (*Draft, error) {
	d, err := CreateAs(root, temporary(name), name)
	if errors.Is(err, fs.ErrExist) {
		d, err = CreateAs(root, temporary(name), name)
	}
	return d, err
}

// CreateAs creates a file with the temporary name temp, which must not exist.
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

// Rename gives the file its name, and replaces an existing file of that name. The file stays open.
func (d *Draft) Rename() error {
	err := rename(d.root, d.temp, d.name, d.made)
	if err == nil {
		d.temp = ""
	}
	return lead(d.root, d.name, err)
}

// Commit syncs the file to the disk, closes it and gives it its name. A network file system may report the error of a
// write only at the sync or the close.
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

// Discard removes a file that still has its temporary name.
func (d *Draft) Discard() error {
	if d.temp == "" {
		return nil
	}
	d.Close() // it may be closed
	err := d.root.Remove(d.temp)
	d.temp = ""
	return lead(d.root, d.name, err)
}

// Write atomically replaces a file in root by one with the content that f writes.
func Write(root *os.Root, name string, f func(w io.Writer) error) error {
	d, err := Create(root, name)
	if err != nil {
		return err
	}
	if err := f(d); err != nil {
		return errors.Join(err, d.Discard())
	}
	return d.Commit()
}

// WriteData does what Write does, with the content data.
func WriteData(root *os.Root, name string, data []byte) error {
	return Write(root, name, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
}

// WriteJSON writes v as JSON, with line breaks and this indent of each level.
func WriteJSON(w io.Writer, indent string, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", indent)
	return enc.Encode(v)
}

// WriteDir atomically makes a directory with the content that f writes. It replaces an empty directory of that name,
// and fails if anything else has the name.
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

// fill calls f with a directory and syncs the names in it.
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

// WriteTo does what Write does, at a path from the user. It replaces a link and does not follow it. It fails for a path
// that is not a file.
func WriteTo(path string, f func(w io.Writer) error) error {
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

// Append opens a private file in root to append to, and makes a missing one. It rejects symbolic links, and files with
// several hard links.
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

// Update opens a regular file in root to read and write, for example to lock it: on a network file system, an exclusive
// lock requires write access.
func Update(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK, 0)
	f, err = regular(name, f, err)
	return f, lead(root, name, err)
}

// Lockable does what Update does, and makes a missing file.
func Lockable(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_CREATE|os.O_RDWR|unix.O_NONBLOCK, fileMode)
	f, err = regular(name, f, err)
	return f, lead(root, name, err)
}

// Sync writes the names in a directory to the disk. A rename does not.
func Sync(root *os.Root) error {
	d, err := root.Open(".")
	if err != nil {
		return lead(root, ".", err)
	}
	defer d.Close()
	return d.Sync()
}

// escapes is package os's error text for a link that leads out of a root.
const escapes = "path escapes from parent"

// lead adds the directory to the name in an error of a root, and the fix for a link that leads out of it.
func lead(root *os.Root, name string, err error) error {
	if err == nil {
		return nil
	}
	if le := (*os.LinkError)(nil); errors.As(err, &le) {
		err = le.Err
	} else if pe := (*fs.PathError)(nil); !errors.As(err, &pe) {
		return err // not from package os
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

// Refresh makes a network file system read a directory again, so that earlier changes by other hosts become visible.
// Opening a directory by its path asks the server. A look-up in an open directory may use a cache of existing or
// missing names that is seconds old. If the handle is stale, Refresh returns a new one and closes the old one. made
// identifies the directory: Refresh rejects another directory that now has the path.
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
	if err != nil { // it was renamed or removed
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

// Rename renames a file or a directory. A network file system may send a request twice, and the second reply is that
// the old name is missing. Rename ignores that if the file has the new name.
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

// Exclusive makes a new file with the given content and syncs it to the disk. If several processes try, on any host,
// one succeeds. After an error, the file may exist without its content.
func Exclusive(root *os.Root, name string, data []byte) error {
	return exclusive(root, name, data, fileMode)
}

// Secret does what Exclusive does, with mode 0600 for any umask.
func Secret(root *os.Root, name string, data []byte) error {
	const mode = 0o600
	if err := exclusive(root, name, data, mode); err != nil {
		return err
	}
	return lead(root, name, root.Chmod(name, mode))
}

// Publish does what Secret does, and the file appears with its whole content, even if this process ends in the middle.
// On a file system without hard links it only does what Secret does.
func Publish(root *os.Root, name string, data []byte) error {
	temp := temporary(name)
	if err := Secret(root, temp, data); err != nil {
		return err
	}
	err := root.Link(temp, name)
	_ = root.Remove(temp) // harmless if it stays
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return Secret(root, name, data)
	}
	return lead(root, name, err)
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

// statfs describes the file system of a path, or of its nearest existing parent.
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
