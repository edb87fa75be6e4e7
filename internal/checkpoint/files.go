package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"
)

const latestName = "latest"

// dirName is the directory of a step.
func dirName(step int64) string { return fmt.Sprintf("step-%08d", step) }

// A checkpoint set aside while another of the same step takes its place is called
// step-00000100.old-<run>. It counts as one until that is done, so that a crash in between
// costs nothing.
var dirPattern = regexp.MustCompile(`^step-(\d{8,18})(\.old-[A-Za-z0-9_.-]+)?$`)

// found is a directory that is named as a checkpoint is.
type found struct {
	name string
	step int64
	old  bool
}

// list gives the checkpoints in dir by step, newest first. Their names are all that is known
// of them.
func list(dir string) ([]found, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []found
	for _, e := range entries {
		m := dirPattern.FindStringSubmatch(e.Name())
		if m == nil || !e.IsDir() {
			continue
		}
		step, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil {
			return nil, err
		}
		all = append(all, found{e.Name(), step, m[2] != ""})
	}
	slices.SortFunc(all, func(a, b found) int {
		return cmp.Or(cmp.Compare(b.step, a.step), cmp.Compare(a.name, b.name)) // without .old first
	})
	return all, nil
}

// writeSynced writes a file and waits until it is on the disk.
func writeSynced(path string, data []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// errLocked is the cause when another process holds a lock.
var errLocked = errors.New("locked by another process")

// lockFile takes a lock (shared or exclusive) on an open file without waiting. The kernel
// gives it back when the holder ends, however it ends. File systems that know no locks give
// none: then a run directory is protected by nothing but its users.
func lockFile(f *os.File, how int) error {
	err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return errLocked
	}
	return nil
}

// Lock makes this process the only one that writes checkpoints into dir, until it closes the
// file or ends. The directory is made if need be.
func Lock(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := lockFile(f, syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w: another run writes into this run directory", dir, err), f.Close())
	}
	return f, nil
}
