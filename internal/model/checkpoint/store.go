package checkpoint

import (
	"context"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/cprun/cprun/internal/base/files"
)

// A store is a directory for checkpoints: the operating system's, and in tests a file system
// that behaves as a network one may.
type store interface {
	Name() string
	Close() error

	List() ([]fs.DirEntry, error)
	Lstat(name string) (fs.FileInfo, error)
	Open(name string) (file, error)   // a regular file, to read
	Update(name string) (file, error) // to lock it for one process alone
	Dir(name string) (store, error)
	Sub(name string) (store, error) // made if absent

	Create(temp, name string) (draft, error)  // temp must be free
	Exclusive(name string, data []byte) error // name must be free, on every host
	Rename(from, to string) error             // of a directory
	RemoveAll(name string) error              // no error if absent
	Sync() error                              // names are on the disk

	Refresh() error                             // changes of other hosts become visible
	Remote() bool                               // other hosts may write here
	Pause(ctx context.Context, d time.Duration) // a wait for another host
}

// A file is an open file.
type file interface {
	io.Reader
	io.ReaderAt
	io.Closer
	Name() string
	Stat() (fs.FileInfo, error)
}

// A draft is a file that does not have its name yet.
type draft interface {
	io.Writer
	Sync() error
	Commit() error // sync, close, and give it its name: each may fail of an earlier write
	Discard() error
}

// A disk is a store of the operating system, and owns its root.
type disk struct {
	root *os.Root
	made fs.FileInfo // tells the directory from others
}

// diskOf takes an open directory for a store.
func diskOf(root *os.Root, err error) (store, error) {
	if err != nil {
		return nil, err
	}
	st, err := root.Stat(".")
	if err != nil {
		root.Close()
		return nil, err
	}
	return &disk{root, st}, nil
}

// duplicate opens a directory of the caller's once more.
func duplicate(dir *os.Root) (store, error) { return diskOf(files.Again(dir)) }

func (d *disk) Name() string { return d.root.Name() }

func (d *disk) Close() error { return d.root.Close() }

func (d *disk) List() ([]fs.DirEntry, error) { return fs.ReadDir(d.root.FS(), ".") }

func (d *disk) Lstat(name string) (fs.FileInfo, error) { return d.root.Lstat(name) }

func (d *disk) Open(name string) (file, error) { return fileOf(files.OpenIn(d.root, name)) }

func (d *disk) Update(name string) (file, error) { return fileOf(files.Update(d.root, name)) }

// fileOf keeps a nil pointer out of the interface.
func fileOf(f *os.File, err error) (file, error) {
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (d *disk) Dir(name string) (store, error) { return diskOf(files.OpenDirIn(d.root, name)) }

func (d *disk) Sub(name string) (store, error) { return diskOf(files.Sub(d.root, name)) }

func (d *disk) Create(temp, name string) (draft, error) {
	f, err := files.CreateAs(d.root, temp, name)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (d *disk) Exclusive(name string, data []byte) error { return files.Exclusive(d.root, name, data) }

func (d *disk) Rename(from, to string) error { return files.Rename(d.root, from, to) }

func (d *disk) RemoveAll(name string) error { return d.root.RemoveAll(name) }

func (d *disk) Sync() error { return files.Sync(d.root) }

// Refresh looks at the directory anew, and opens it again by its path if the handle has become
// stale, as it may when a server comes back. Another directory of that path is not taken for it.
func (d *disk) Refresh() error {
	root, err := files.Refresh(d.root, d.made)
	if err == nil {
		d.root = root
	}
	return err
}

func (d *disk) Remote() bool { return files.Remote(d.Name()) }

func (d *disk) Pause(ctx context.Context, t time.Duration) {
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// at returns the path of a name in a store.
func at(d store, name string) string { return filepath.Join(d.Name(), name) }
