package launch

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	secretSize = 32
	// dirPrefix and markerName identify private directories of jobs for removeStale. Users do not choose such names by
	// chance.
	dirPrefix  = "cprun-job-"
	markerName = ".cprun-launcher"
	// The path of a socket must fit into sockaddr_un with its zero byte. socketNameRoom bytes of it are for the
	// workers' names inside the directory.
	maxSocketPath  = 107
	socketNameRoom = 40
)

// A jobDir is a job's private directory, mode 0700, for the workers' sockets. The launcher holds a lock on it, which
// the kernel releases with the process. So a later job can detect and remove the directory of a killed launcher.
// systemd-tmpfiles does not remove locked directories either.
type jobDir struct {
	path string
	lock *os.File // the directory itself
}

// newJobDir makes a directory under the first usable base with a short enough path.
func newJobDir(bases ...string) (*jobDir, error) {
	var faults []error
	for _, base := range bases {
		if base == "" {
			continue
		}
		if n := len(filepath.Join(base, dirPrefix+"0123456789")) + 1 + socketNameRoom; n > maxSocketPath {
			faults = append(faults, fmt.Errorf("%s: too long for the path of a socket (%d bytes, at most %d)", base, n,
				maxSocketPath))
			continue
		}
		removeStale(base)
		d, err := lockedDir(base)
		if err == nil {
			return d, nil
		}
		faults = append(faults, err)
	}
	return nil, fmt.Errorf("private directory for sockets (set TMPDIR to a short, writable path): %w",
		errors.Join(faults...))
}

// lockedDir makes the directory, locks it, and only then adds the marker that removeStale requires.
func lockedDir(base string) (*jobDir, error) {
	path, err := os.MkdirTemp(base, dirPrefix)
	if err != nil {
		return nil, err
	}
	d := &jobDir{path: path}
	if d.lock, err = os.Open(path); err == nil {
		err = unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(path, markerName), nil, 0o600)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock of %s: %w", path, err), d.close())
	}
	return d, nil
}

// close removes the directory. d may be nil.
func (d *jobDir) close() error {
	if d == nil {
		return nil
	}
	err := os.RemoveAll(d.path)
	if d.lock != nil {
		d.lock.Close()
	}
	return err
}

// removeStale removes this user's job directories without a live launcher. It ignores errors.
func removeStale(base string) {
	entries, _ := os.ReadDir(base)
	for _, e := range entries {
		path := filepath.Join(base, e.Name())
		if !strings.HasPrefix(e.Name(), dirPrefix) || !ownedPrivate(path) {
			continue
		}
		if _, err := os.Lstat(filepath.Join(path, markerName)); err != nil {
			continue
		}
		lock, err := os.Open(path)
		if err != nil {
			continue
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			os.RemoveAll(path)
		}
		lock.Close()
	}
}

// ownedPrivate reports whether path is a directory of this user with no access for others.
func ownedPrivate(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || !info.IsDir() || info.Mode().Perm()&0o077 != 0 {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Getuid()
}

// NewRunID returns a unique name of a job: the time and 32 random bits.
func NewRunID(now time.Time) string {
	var b [4]byte
	rand.Read(b[:])
	return fmt.Sprintf("%s-%x", now.UTC().Format("20060102-150405"), b)
}

// NewSecret returns a random Secret.
func NewSecret() []byte {
	b := make([]byte, secretSize)
	rand.Read(b)
	return b
}
