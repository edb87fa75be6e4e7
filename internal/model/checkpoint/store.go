package checkpoint

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// A store is a directory for checkpoints: of the operating system, or in tests a simulated network file system.
type store interface {
	Name() string
	Close() error

	List() ([]fs.DirEntry, error)
	Lstat(name string) (fs.FileInfo, error)
	Open(name string) (file, error)   // a regular file, to read
	Update(name string) (file, error) // for an exclusive lock
	Dir(name string) (store, error)
	Sub(name string) (store, error) // created if absent

	Create(temp, name string) (draft, error)  // temp must not exist
	Exclusive(name string, data []byte) error // mode 0600, all or nothing; name must not exist on any host
	Rename(from, to string) error             // of a directory
	RemoveAll(name string) error              // no error if absent
	Sync() error                              // makes names durable

	Refresh() error                             // makes changes of other hosts visible
	Remote() bool                               // other hosts may write here
	Pause(ctx context.Context, d time.Duration) // waits for another host
}

type file interface {
	io.Reader
	io.ReaderAt
	io.Closer
	Name() string
	Stat() (fs.FileInfo, error)
}

// A draft is a file under a temporary name.
type draft interface {
	io.Writer
	Sync() error
	Commit() error // sync, close and rename; each may report an earlier failed write
	Discard() error
}

// A disk is a store of the operating system. It owns its root.
type disk struct {
	root *os.Root
	made fs.FileInfo // identifies the directory
}

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

func reopen(dir *os.Root) (store, error) { return diskOf(files.Again(dir)) }

func (d *disk) Name() string { return d.root.Name() }

func (d *disk) Close() error { return d.root.Close() }

func (d *disk) List() ([]fs.DirEntry, error) { return fs.ReadDir(d.root.FS(), ".") }

func (d *disk) Lstat(name string) (fs.FileInfo, error) { return d.root.Lstat(name) }

func (d *disk) Open(name string) (file, error) { return fileOf(files.OpenIn(d.root, name)) }

func (d *disk) Update(name string) (file, error) { return fileOf(files.Update(d.root, name)) }

// fileOf avoids a nil pointer in the interface.
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

func (d *disk) Exclusive(name string, data []byte) error { return files.Publish(d.root, name, data) }

func (d *disk) Rename(from, to string) error { return files.Rename(d.root, from, to) }

func (d *disk) RemoveAll(name string) error { return d.root.RemoveAll(name) }

func (d *disk) Sync() error { return files.Sync(d.root) }

// Refresh rereads the directory, and reopens it by its path if the handle is stale, as after a restart of the server.
// It refuses another directory of that path.
func (d *disk) Refresh() error {
	root, err := files.Refresh(d.root, d.made)
	if err == nil {
		d.root = root
	}
	return err
}

func (d *disk) Remote() bool { return files.Remote(d.Name()) }

func (d *disk) Pause(ctx context.Context, t time.Duration) {
	select {
	case <-time.After(t):
	case <-ctx.Done():
	}
}

func pathOf(d store, name string) string { return filepath.Join(d.Name(), name) }

const latestName = "latest"

// bestName is the file that names the checkpoint with the lowest validation loss.
const bestName = "best"

func dirName(step int64) string { return fmt.Sprintf("step-%08d", step) }

// While a checkpoint of the same step replaces it, an older one is named step-00000100.old-<run>. It still counts as a
// checkpoint, so that a crash loses nothing.
var dirPattern = regexp.MustCompile(`^step-(\d{8,18})(\.old-[A-Za-z0-9_-]+)?$`)

// A stepDir is a directory with the name of a checkpoint.
type stepDir struct {
	name string
	step int64
	old  bool
}

// entriesOf lists a directory, past any cache.
func entriesOf(dir store) (entries []fs.DirEntry, err error) {
	err = retry(dir, func() error {
		err := dir.Refresh()
		if err == nil {
			entries, err = dir.List()
		}
		return err
	})
	return entries, err
}

// list returns the checkpoints in dir by name, newest step first. They may be damaged.
func list(dir store) ([]stepDir, error) {
	entries, err := entriesOf(dir)
	if err != nil {
		return nil, err
	}
	var all []stepDir
	for _, e := range entries {
		m := dirPattern.FindStringSubmatch(e.Name())
		if m == nil || !e.IsDir() {
			continue
		}
		step, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil {
			return nil, err
		}
		all = append(all, stepDir{e.Name(), step, m[2] != ""})
	}
	slices.SortFunc(all, func(a, b stepDir) int {
		return cmp.Or(cmp.Compare(b.step, a.step), cmp.Compare(a.name, b.name)) // without .old first
	})
	return all, nil
}

var errLocked = errors.New("locked by another process")

// lockName is the lock file of a run's launcher. Its text names the last holder.
const lockName = ".lock"

// lockFile takes a shared or exclusive lock on an open file without waiting. The kernel releases it when the holder
// ends. A network file system may refuse it or hold it on this host alone, so between hosts the generations fence the
// commits.
func lockFile(f file, how int) error {
	of, ok := f.(*os.File)
	if ok && errors.Is(syscall.Flock(int(of.Fd()), how|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		return errLocked
	}
	return nil
}

// Lock makes this process the only writer of checkpoints in a directory, until it closes the file or ends. If another
// process of the same job has the lock, the file is nil: that process led the job before on a node that was cut off or
// suspended, and the newer generation keeps it from writing. A job of one process has the name "".
func Lock(dir *os.Root, job string) (*os.File, error) {
	// The next save could not replace such a directory, and the work until then would be lost.
	if st, err := dir.Lstat(latestName); err == nil && st.IsDir() {
		return nil, fmt.Errorf(
			"%s: not a regular file (%v), where the name of the newest checkpoint belongs; move it away",
			terminal.Name(filepath.Join(dir.Name(), latestName)), st.Mode().Type())
	}
	f, err := files.Lockable(dir, lockName)
	if err != nil {
		return nil, err
	}
	if err := lockFile(f, syscall.LOCK_EX); err != nil {
		f.Close()
		by := holder(dir)
		if job != "" && by.Job == job {
			return nil, nil
		}
		return nil, fmt.Errorf("%s is in use by %s: %w", terminal.Name(dir.Name()), by, err)
	}
	o := newOrigin()
	o.Job = job
	// The text is for people only. A second name of the file may mean that it is not cprun's.
	if st, err := f.Stat(); err == nil && st.Sys().(*syscall.Stat_t).Nlink == 1 && f.Truncate(0) == nil {
		_, _ = f.WriteAt(append(encode(o), '\n'), 0)
	}
	return f, nil
}

// holder returns the process with the lock, if known.
func holder(dir *os.Root) (o origin) {
	if data, err := files.ReadIn(dir, lockName, maxOrigin); err == nil {
		_ = json.Unmarshal(data, &o)
	}
	return o
}
