package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// clean removes what was half-written: by dead runs, since the directory's lock makes sure
// that no other is alive, and by this one when own is set, between its saves. A checkpoint
// that was set aside goes once the one that took its place is whole.
func (s *Saver) clean(own bool) {
	entries, err := os.ReadDir(s.o.Dir)
	if err != nil {
		s.o.Warn(fmt.Errorf("old checkpoints: %w", err))
		return
	}
	for _, e := range entries {
		name := e.Name()
		base, owner, tmp := strings.Cut(name, ".tmp-")
		var err error
		switch {
		case tmp && (base == latestName || dirPattern.MatchString(base)):
			// Other ranks of this run may already write into their first directory.
			if own || owner != s.o.RunID {
				err = os.RemoveAll(filepath.Join(s.o.Dir, name))
			}
		case dirPattern.MatchString(name) && strings.Contains(name, ".old-"):
			final, _, _ := strings.Cut(name, ".old-")
			if c, bad := Open(filepath.Join(s.o.Dir, final)); bad == nil {
				c.Close()
				err = s.remove(name)
			}
		}
		if err != nil {
			s.o.Warn(fmt.Errorf("remains of an earlier save: %w", err))
		}
	}
}

// prune removes all but the Keep newest whole checkpoints. Those of later steps than the one
// just written belong to a future that the run has gone back from, and are the first to go.
// Damaged ones are not counted, and go when they are older than what is kept.
func (s *Saver) prune(step int64) {
	if s.o.Keep <= 0 {
		return
	}
	all, err := list(s.o.Dir)
	if err != nil {
		s.o.Warn(fmt.Errorf("old checkpoints: %w", err))
		return
	}
	var past, future []found
	for _, f := range all {
		if f.step > step {
			future = append(future, f)
		} else {
			past = append(past, f)
		}
	}
	kept := 0
	for _, f := range append(past, future...) {
		if kept >= s.o.Keep {
			if err := s.remove(f.name); err != nil {
				s.o.Warn(fmt.Errorf("old checkpoint: %w", err))
			}
			continue
		}
		c, err := Open(filepath.Join(s.o.Dir, f.name))
		if err == nil || errors.Is(err, ErrVersion) {
			kept++
		}
		if err == nil {
			c.Close()
		}
	}
}

// remove deletes a checkpoint unless somebody has it open. It loses its name first, so that
// a crash in between leaves nothing that looks like one.
func (s *Saver) remove(name string) error {
	path := filepath.Join(s.o.Dir, name)
	f, err := os.OpenFile(filepath.Join(path, manifestName), os.O_RDWR, 0)
	switch {
	case err == nil:
		defer f.Close()
		if errors.Is(lockFile(f, syscall.LOCK_EX), errLocked) {
			return nil // the next save tries again
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	gone := path + ".tmp-" + s.o.RunID + ".pruned"
	if err := os.Rename(path, gone); err != nil {
		return err
	}
	if err := s.at("pruning"); err != nil {
		return err
	}
	return os.RemoveAll(gone)
}
