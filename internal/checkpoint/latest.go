package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ErrNone is returned when a directory holds no checkpoint, whole or not.
var ErrNone = errors.New("no checkpoint")

// ErrNoneWhole is returned when it holds checkpoints and all are damaged.
var ErrNoneWhole = errors.New("holds checkpoints, none whole")

// Latest opens the newest whole checkpoint in a checkpoints directory, all checksums
// verified: the one that the file latest names or, if that is damaged, the next older whole
// one. Where no older one is whole, those of later steps are tried too, which a crash before
// the update of latest leaves. The reasons say, one by one, what was passed over and why;
// they are for the user to see. The error is ErrNone where there is none, ErrNoneWhole where
// there are and all are damaged, and ErrVersion where the newest is of a newer cprun: to begin
// anew, or behind it, would lose work in silence.
//
// It reads all shards, so on many ranks one calls it and tells the others the name.
func Latest(ctx context.Context, dir string) (c *Checkpoint, reasons []string, err error) {
	all, err := list(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("checkpoints: %w", err)
	}
	order, reason := candidates(dir, all)
	if reason != "" {
		reasons = append(reasons, reason)
	}
	for _, name := range order {
		c, err := Open(filepath.Join(dir, name))
		if err == nil {
			if err = c.Verify(ctx); err == nil {
				return c, reasons, nil
			}
			c.Close()
		}
		if ctx.Err() != nil {
			return nil, reasons, fmt.Errorf("checkpoints: %w", context.Cause(ctx))
		}
		if errors.Is(err, ErrVersion) {
			return nil, reasons, err
		}
		reasons = append(reasons, err.Error())
	}
	if len(reasons) > 0 {
		return nil, reasons, fmt.Errorf("%s %w", dir, ErrNoneWhole)
	}
	return nil, nil, fmt.Errorf("%s: %w", dir, ErrNone)
}

// candidates is the names to try, in order: what latest says, older ones, later ones.
func candidates(dir string, all []found) (order []string, reason string) {
	step, named, err := readLatest(dir, all)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a crash before its first update leaves no latest
		reason = err.Error()
	}
	var later []string
	for _, f := range all {
		switch {
		case f.name == named:
			order = append([]string{f.name}, order...)
		case err == nil && f.step > step:
			later = append(later, f.name)
		default:
			order = append(order, f.name)
		}
	}
	return append(order, later...), reason
}

// readLatest is the checkpoint that the file latest names, be it set aside for the moment.
func readLatest(dir string, all []found) (step int64, name string, err error) {
	path := filepath.Join(dir, latestName)
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, "", err
	}
	name = strings.TrimSpace(string(data))
	for _, f := range all {
		if f.name == name || f.old && strings.HasPrefix(f.name, name+".old-") {
			return f.step, f.name, nil
		}
	}
	return 0, "", fmt.Errorf("%s: it names %.64q, which is not there", path, name)
}

// Find opens what a user calls a checkpoint: the directory of one, or a run directory, a
// checkpoints directory or the file latest in it, which mean the newest whole one. All
// checksums are verified. The errors and the reasons are those of Latest.
func Find(ctx context.Context, path string) (*Checkpoint, []string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoint: %w", err)
	}
	if st.Mode().IsRegular() && filepath.Base(path) == latestName {
		return Latest(ctx, filepath.Dir(path))
	}
	_, err = os.Stat(filepath.Join(path, manifestName))
	if err != nil && !dirPattern.MatchString(filepath.Base(path)) {
		return Latest(ctx, dirOf(path))
	}
	c, err := Open(path)
	if err != nil {
		return nil, nil, err
	}
	if err := c.Verify(ctx); err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, nil, nil
}
