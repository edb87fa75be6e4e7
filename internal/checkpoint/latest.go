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

// ErrNone is returned when a directory holds no whole checkpoint.
var ErrNone = errors.New("no whole checkpoint")

// Latest opens the newest whole checkpoint in a checkpoints directory, all checksums
// verified: the one that the file latest names or, if that is damaged, the next older whole
// one. Where no older one is whole, those of later steps are tried too, which a crash before
// the update of latest leaves. The reasons say, one by one, what was passed over and why;
// they are for the user to see. The error is ErrNone where nothing is whole, and ErrVersion
// where the newest is of a newer cprun, since going back behind it would lose work in silence.
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
	return nil, reasons, fmt.Errorf("%s: %w", dir, ErrNone)
}

// candidates is the names to try, in order: what latest says, older ones, later ones.
func candidates(dir string, all []found) (order []string, reason string) {
	step, named, err := readLatest(dir, all)
	if err != nil && len(all) > 0 {
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

// Find opens what a user calls a checkpoint: the directory of one, a checkpoints directory,
// or a run directory, of which the latter two mean the newest whole one. The errors and the
// reasons are those of Latest. Checksums of a directory that is named itself are verified as
// it is read.
func Find(ctx context.Context, path string) (*Checkpoint, []string, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, nil, fmt.Errorf("checkpoint: %w", err)
	}
	_, err := os.Stat(filepath.Join(path, manifestName))
	if err == nil || dirPattern.MatchString(filepath.Base(path)) {
		c, err := Open(path)
		return c, nil, err
	}
	return Latest(ctx, dirOf(path))
}
