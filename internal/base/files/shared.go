package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/terminal"
)

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
