package command

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cprun/cprun/internal/files"
	"github.com/cprun/cprun/internal/launch"
)

// scratch is the directory of a command that leaves nothing, for as long as it runs. Its lock tells
// it from those of commands that were killed.
type scratch struct {
	path string
	lock *os.File
}

// running is the file that is locked.
const running = ".running"

// newScratch makes a directory whose name begins with a prefix, which is that of no other kind, and
// removes what killed commands of this user have left.
func newScratch(prefix string) (*scratch, error) {
	sweep(prefix)
	path, err := os.MkdirTemp("", prefix)
	if err != nil {
		return nil, fmt.Errorf("temporary directory: %w", err)
	}
	root, err := files.OpenDir(path)
	if err == nil {
		defer root.Close()
		s := &scratch{path: path}
		if s.lock, err = files.Lockable(root, running); err == nil {
			// Where a file system knows no locks, what a killed command leaves stays.
			_ = syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
			return s, nil
		}
	}
	os.RemoveAll(path)
	return nil, fmt.Errorf("temporary directory: %w", err)
}

// scratchLogs makes one for logs, and opens it. The caller closes the root.
func scratchLogs(prefix string) (*scratch, *os.Root, error) {
	s, err := newScratch(prefix)
	if err != nil {
		return nil, nil, err
	}
	root, err := files.OpenDir(s.path)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("temporary directory: %w", err), s.remove())
	}
	return s, root, nil
}

// end takes it away, or leaves the logs of a failure, which its report names.
func (s *scratch) end(status int) {
	if status == launch.ExitDone {
		s.remove()
		return
	}
	s.keep()
}

// remove takes it away.
func (s *scratch) remove() error {
	s.lock.Close()
	return os.RemoveAll(s.path)
}

// keep leaves it, since a report names what is in it.
func (s *scratch) keep() {
	os.Remove(filepath.Join(s.path, running))
	s.lock.Close()
}

// sweep removes directories of the same kind whose commands are dead.
func sweep(prefix string) {
	all, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*")) // TMPDIR may have what makes a pattern: then nothing is swept
	for _, path := range all {
		st, err := os.Lstat(path)
		if err != nil || !st.IsDir() || st.Sys().(*syscall.Stat_t).Uid != uint32(os.Getuid()) {
			continue
		}
		if dead(path) {
			os.RemoveAll(path)
		}
	}
}

// dead reports whether a directory has a lock that nobody holds.
func dead(path string) bool {
	root, err := files.OpenDir(path)
	if err != nil {
		return false
	}
	defer root.Close()
	f, err := files.Update(root, running)
	if err != nil {
		return false
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
}
