package checkpoint

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
)

// entries lists the directory. What it lists is this start's to remove, where an error does not say
// otherwise: a newer start would have been recorded before it made anything, and none is.
func (s *Saver) entries() (names []string, err error) {
	err = again(s.dir, func() error {
		if err := s.dir.Refresh(); err != nil {
			return err
		}
		all, err := s.dir.List()
		names = nil
		for _, e := range all {
			names = append(names, e.Name())
		}
		return err
	})
	if err == nil {
		err = s.newest()
	}
	return names, err
}

// clean removes what was half-written: by older starts, which can give it no name after that, and by
// this one when own is set, between its saves. A checkpoint that was set aside goes once the one that
// took its place is whole.
func (s *Saver) clean(own bool) error {
	names, err := s.entries()
	if err != nil {
		return fmt.Errorf("remains of earlier saves: %w", err)
	}
	for _, name := range names {
		base, owner, tmp := strings.Cut(name, ".tmp-")
		run, _, _ := strings.Cut(owner, ".")
		var err error
		switch {
		case tmp && (base == latestName || dirPattern.MatchString(base)):
			// Other ranks of this run may already write into their first directory.
			if own || run != s.o.RunID {
				err = s.discard(name)
			}
		case dirPattern.MatchString(name) && strings.Contains(name, ".old-"):
			final, _, _ := strings.Cut(name, ".old-")
			if c, bad := openIn(s.dir, final); bad == nil {
				c.Close()
				err = s.remove(name)
			}
		}
		if err != nil {
			s.o.Warn(fmt.Errorf("remains of an earlier save: %w", err))
		}
	}
	return nil
}

// discard removes something that has no name of a checkpoint. It loses the name that its maker knows
// first, at once and whole: one that comes back cannot make a checkpoint of what is left.
func (s *Saver) discard(name string) error {
	gone := name
	if !strings.HasSuffix(name, prunedEnd) {
		gone = name + "." + rand.Text() + prunedEnd
		if err := again(s.dir, func() error { return s.dir.Rename(name, gone) }); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return again(s.dir, func() error { return s.dir.RemoveAll(gone) })
}

// prunedEnd is the end of the names of what is being removed.
const prunedEnd = ".pruned"

// prune removes all but the Keep newest whole checkpoints. Those of later steps than the one
// just written belong to a future that the run has gone back from, and are the first to go.
// Damaged ones are not counted, and go when they are older than what is kept.
func (s *Saver) prune(step int64) {
	if s.o.Keep <= 0 {
		return
	}
	all, err := list(s.dir)
	if err == nil {
		err = s.newest()
	}
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
		c, err := openIn(s.dir, f.name)
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
	gone := name + ".tmp-" + s.o.RunID + prunedEnd
	moved := false
	err := again(s.dir, func() (err error) {
		moved, err = s.unname(name, gone)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) { // another start has been quicker
		err = nil
	}
	if err != nil || !moved {
		return err // the next save tries again
	}
	if s.newer(gone) {
		return s.dir.Rename(gone, name)
	}
	if err := s.at("pruning"); err != nil {
		return err
	}
	return again(s.dir, func() error { return s.dir.RemoveAll(gone) })
}

// unname takes a checkpoint its name, unless somebody has it open. Its own file is closed then: on a
// network file system a directory with an open file in it is not removed.
func (s *Saver) unname(name, gone string) (moved bool, err error) {
	f, err := s.dir.Update(filepath.Join(name, manifestName))
	switch {
	case err == nil:
		defer f.Close()
		if errors.Is(lockFile(f, syscall.LOCK_EX), errLocked) {
			return false, nil
		}
	case !errors.Is(err, fs.ErrNotExist):
		return false, err
	}
	err = s.dir.Rename(name, gone)
	return err == nil, err
}

// newer says that a checkpoint is of a newer start, which has put it where one of the same step was
// that this one was about to remove.
func (s *Saver) newer(name string) bool {
	c, err := openIn(s.dir, name)
	if err != nil {
		return false
	}
	defer c.Close()
	return c.Manifest.Generation > s.generation
}
