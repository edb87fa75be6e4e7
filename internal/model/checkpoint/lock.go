package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// errLocked reports that another process holds a lock.
var errLocked = errors.New("locked by another process")

// lockName names the file that the launcher of a run locks. Its text names the last holder.
const lockName = ".lock"

// lockFile takes a lock (shared or exclusive) on an open file without waiting. The kernel gives it back
// when the holder ends, however it ends. On a network file system it may hold on this host alone, or
// be refused: so a lock is a courtesy between hosts, and the generation of a start fences its
// commits.
func lockFile(f file, how int) error {
	of, ok := f.(*os.File)
	if ok && errors.Is(syscall.Flock(int(of.Fd()), how|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		return errLocked
	}
	return nil
}

// Lock makes this process the only one that writes checkpoints into a directory, until it closes
// the file or ends. Where another process of the same job has the lock, the file is nil: that one led the
// job before, on a node that was cut off or stands still, and a newer generation keeps it from writing.
// A job of one process has the name "".
func Lock(dir *os.Root, job string) (*os.File, error) {
	// Nothing could take its place at the next save, and all until then would be lost.
	if st, err := dir.Lstat(latestName); err == nil && st.IsDir() {
		return nil, fmt.Errorf("%s: not a regular file (%v), where the name of the newest checkpoint belongs; move it away",
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
	sign(f, job)
	return f, nil
}

// holder returns the process that has the lock, if known.
func holder(dir *os.Root) (o origin) {
	if data, err := files.ReadIn(dir, lockName, maxOrigin); err == nil {
		o, _ = parseOrigin(data)
	}
	return o
}

// sign writes the holder into a lock. A failure leaves it unnamed.
func sign(f *os.File, job string) {
	o := newOrigin()
	o.Job = job
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt(append(encode(o), '\n'), 0)
	}
}
