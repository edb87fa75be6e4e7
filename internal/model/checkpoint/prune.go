package checkpoint

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
)

// clean removes incomplete files of older starts, so that they cannot commit them, and with own those of this start. It
// also removes a checkpoint that was set aside, if its replacement is complete.
func (s *Saver) clean(own bool) error {
	entries, err := entriesOf(s.dir)
	if err == nil { // this start may remove any entry: a newer one would record itself before it creates files
		err = s.fence.check()
	}
	if err != nil {
		return fmt.Errorf("remains of earlier saves: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		base, owner, tmp := strings.Cut(name, ".tmp-")
		run, _, _ := strings.Cut(owner, ".")
		var err error
		switch {
		case tmp && (base == latestName || base == bestName || dirPattern.MatchString(base) ||
			generationPattern.MatchString(base)):
			// Other ranks of this run may already write to their first directory.
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

// discard removes an uncommitted file or directory. It renames it first, so that its owner, if still running, cannot
// commit a part of it.
func (s *Saver) discard(name string) error {
	gone := name
	if !strings.HasSuffix(name, prunedEnd) {
		gone = name + "." + rand.Text() + prunedEnd
		err := retry(s.dir, func() error { return s.dir.Rename(name, gone) })
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return retry(s.dir, func() error { return s.dir.RemoveAll(gone) })
}

// prunedEnd is the suffix of directories under removal.
const prunedEnd = ".pruned"

// prune keeps only the newest Keep complete checkpoints and the best. It first removes later steps than the current
// one, which a resume from an older step left. Damaged checkpoints do not count, and are removed if older than the kept
// ones.
func (s *Saver) prune(step int64) {
	if s.o.Keep <= 0 {
		return
	}
	all, err := list(s.dir)
	if err == nil {
		err = s.fence.check()
	}
	best := ""
	if err == nil {
		best, err = readBest(s.dir, all)
	}
	if err != nil {
		s.o.Warn(fmt.Errorf("old checkpoints: %w", err))
		return
	}
	var past, future []stepDir
	for _, f := range all {
		if f.step > step {
			future = append(future, f)
		} else {
			past = append(past, f)
		}
	}
	kept := 0
	for _, f := range append(past, future...) {
		if kept >= s.o.Keep && f.name == best {
			continue
		}
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

// remove deletes a checkpoint unless a process has it open. It renames it first, so that a crash leaves no incomplete
// checkpoint.
func (s *Saver) remove(name string) error {
	gone := name + ".tmp-" + s.o.RunID + prunedEnd
	moved := false
	err := retry(s.dir, func() (err error) {
		moved, err = s.renameUnlessOpen(name, gone)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) { // another start was faster
		err = nil
	}
	if err != nil && s.dir.Refresh() == nil { // the reply alone may be lost
		if _, there := s.dir.Lstat(gone); there == nil {
			moved, err = true, nil
		}
	}
	if err != nil || !moved {
		return err // the next save tries again
	}
	if newer, err := s.ofNewerStart(gone); newer || transient(err) {
		return errors.Join(err, retry(s.dir, func() error { return s.dir.Rename(gone, name) }))
	}
	if err := s.at("pruning"); err != nil {
		return err
	}
	return retry(s.dir, func() error { return s.dir.RemoveAll(gone) })
}

// renameUnlessOpen renames a checkpoint to gone, unless a process has it open. Then it closes its own file: network
// file systems do not remove directories with open files.
func (s *Saver) renameUnlessOpen(name, gone string) (moved bool, err error) {
	f, err := s.dir.Update(filepath.Join(name, manifestName))
	st, bad := s.dir.Lstat(name)
	switch {
	case bad == nil && !st.IsDir(): // a file or a link has no manifest to lock
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

// ofNewerStart reports whether a checkpoint is from a newer start, which may have replaced the checkpoint to remove. An
// error that is not transient means that the checkpoint is damaged.
func (s *Saver) ofNewerStart(name string) (newer bool, err error) {
	err = awaitVisible(context.Background(), s.dir, shortWait, func() error {
		c, err := openIn(s.dir, name)
		if err == nil {
			newer = c.Manifest.Generation > s.fence.start.Generation
			c.Close()
		}
		return err
	})
	return newer, err
}
