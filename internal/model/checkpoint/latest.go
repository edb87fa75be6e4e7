package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// ErrNone reports a directory without checkpoints, complete or not.
var ErrNone = errors.New("no checkpoint")

// ErrNoneWhole reports a directory in which all checkpoints are damaged.
var ErrNoneWhole = errors.New("holds checkpoints, all of them damaged")

// Latest opens the newest complete checkpoint in a checkpoints directory and verifies all its checksums. It tries the
// one in the file latest first, then older ones, then later ones, which a crash before the update of latest leaves. The
// reasons explain the skipped checkpoints to the user. The error is ErrNone if there are none, ErrNoneWhole if all are
// damaged, and ErrVersion if a newer cprun wrote the newest: an older one would silently lose work.
//
// It reads all shards, so one rank should call it and send the name to the others.
func Latest(ctx context.Context, dir string) (c *Checkpoint, reasons []string, err error) {
	root, err := files.OpenDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("%s: %w", terminal.Name(dir), ErrNone)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoints: %w", err)
	}
	defer root.Close()
	return LatestIn(ctx, root)
}

// LatestIn opens the newest complete checkpoint like Latest, in an open directory.
func LatestIn(ctx context.Context, dir *os.Root) (c *Checkpoint, reasons []string, err error) {
	d, err := reopen(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoints: %w", err)
	}
	defer d.Close()
	return latestIn(ctx, d)
}

// maxTries bounds the checkpoints that are tried. A run keeps a few.
const maxTries = 1000

// listCandidates returns the candidates in a directory. It waits until the checkpoint in latest is visible, since
// another host may just have made it.
func listCandidates(ctx context.Context, dir store) (order []string, reason string, err error) {
	err = awaitVisible(ctx, dir, shortWait, func() error {
		all, err := list(dir)
		if err != nil {
			return err
		}
		var missing error
		order, missing = candidates(dir, all)
		reason = errText(missing)
		return missing
	})
	if err != nil && reason != "" { // the names are known
		err = nil
	}
	return order, reason, err
}

func latestIn(ctx context.Context, dir store) (c *Checkpoint, reasons []string, err error) {
	order, reason, err := listCandidates(ctx, dir)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoints: %w", err)
	}
	if reason != "" {
		reasons = append(reasons, reason)
	}
	if left := len(order) - maxTries; left > 0 {
		order = order[:maxTries]
		reasons = append(reasons, fmt.Sprintf("%d directories more are called checkpoints, and are not looked at",
			left))
	}
	more := 0
	for i, name := range order {
		limit := time.Duration(0)
		if i == 0 { // it must exist
			limit = shortWait
		}
		c, err := openWait(ctx, dir, name, limit)
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
		if transient(err) { // it may be complete, and an older one would lose work
			return nil, reasons, fmt.Errorf("checkpoints: %w", withFix(err))
		}
		if len(reasons) < terminal.MaxFaults {
			reasons = append(reasons, err.Error())
		} else {
			more++
		}
	}
	if more > 0 {
		reasons = append(reasons, fmt.Sprintf("and %d more", more))
	}
	if len(reasons) > 0 {
		return nil, reasons, fmt.Errorf("%s %w", terminal.Name(dir.Name()), ErrNoneWhole)
	}
	return nil, nil, fmt.Errorf("%s: %w", terminal.Name(dir.Name()), ErrNone)
}

// candidates returns the names to try, in order: the one in latest, older ones, later ones. missing is the fault of
// latest.
func candidates(dir store, all []stepDir) (order []string, missing error) {
	step, named, err := readPointer(dir, latestName, all)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // absent after a crash before its first update
		missing = err
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
	return append(order, later...), missing
}

const maxLatest = 4 << 10

// readPointer returns the checkpoint in the file latest or best, even if it is set aside at the moment.
func readPointer(dir store, pointer string, all []stepDir) (step int64, name string, err error) {
	data, err := readIn(dir, pointer, maxLatest)
	if err != nil {
		return 0, "", err
	}
	name = strings.TrimSpace(string(data))
	for _, f := range all {
		if f.name == name || f.old && strings.HasPrefix(f.name, name+".old-") {
			return f.step, f.name, nil
		}
	}
	return 0, "", &staleView{fmt.Errorf("%s: names %.64q, which does not exist", terminal.Name(pathOf(dir, pointer)),
		name)}
}

// readBest returns the checkpoint in the file best; "" if there is no such file, or no such checkpoint.
func readBest(dir store, all []stepDir) (string, error) {
	_, name, err := readPointer(dir, bestName, all)
	if errors.Is(err, fs.ErrNotExist) || errors.As(err, new(*staleView)) {
		err = nil
	}
	return name, err
}

// Best opens the checkpoint in the file best of a checkpoints directory, without reading its shards. The error is
// ErrNone if there is none.
func Best(ctx context.Context, path string) (*Checkpoint, error) {
	dir, err := diskOf(files.OpenDir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", terminal.Name(path), ErrNone)
	}
	if err != nil {
		return nil, fmt.Errorf("checkpoints: %w", err)
	}
	defer dir.Close()
	name := ""
	all, err := list(dir)
	if err == nil {
		name, err = readBest(dir, all)
	}
	if err != nil {
		return nil, fmt.Errorf("checkpoints: %w", err)
	}
	if name == "" {
		return nil, fmt.Errorf("%s: %w", terminal.Name(filepath.Join(path, bestName)), ErrNone)
	}
	return openWait(ctx, dir, name, shortWait)
}

// OfStep returns the directory of a step's checkpoint in a run or checkpoints directory. The error lists the existing
// steps.
func OfStep(path string, step int64) (string, error) {
	dir, err := diskOf(files.OpenDir(dirOf(path)))
	if err != nil {
		return "", fmt.Errorf("checkpoints: %w", err)
	}
	defer dir.Close()
	all, err := list(dir)
	if err != nil {
		return "", fmt.Errorf("checkpoints: %w", err)
	}
	var there []string
	for _, f := range all {
		if f.step == step {
			return filepath.Join(dir.Name(), f.name), nil
		}
		if len(there) < maxTries {
			there = append(there, strconv.FormatInt(f.step, 10))
		}
	}
	slices.Reverse(there)
	if len(there) == 0 {
		return "", fmt.Errorf("%s: %w", terminal.Name(dir.Name()), ErrNone)
	}
	return "", fmt.Errorf("no checkpoint of step %d; there are those of %s", step, strings.Join(there, ", "))
}

// Find opens a checkpoint by a user's path: a checkpoint, or a run directory, a checkpoints directory or its file
// latest for the newest complete one, or its file best. It verifies all checksums. Errors and reasons are as in Latest.
func Find(ctx context.Context, path string) (*Checkpoint, []string, error) {
	st, err := files.Stat(path)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoint: %w", err)
	}
	if st.Mode().IsRegular() && filepath.Base(path) == latestName {
		return Latest(ctx, filepath.Dir(path))
	}
	best := st.Mode().IsRegular() && filepath.Base(path) == bestName
	_, err = files.Stat(filepath.Join(path, manifestName))
	if err != nil && !best && !dirPattern.MatchString(filepath.Base(path)) {
		return Latest(ctx, dirOf(path))
	}
	var c *Checkpoint
	if best {
		c, err = Best(ctx, filepath.Dir(path))
	} else {
		c, err = Open(path)
	}
	if err != nil {
		return nil, nil, err
	}
	if err := c.Verify(ctx); err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, nil, nil
}

// verifyAtOnce bounds the shards that are hashed in parallel: enough for a fast disk, and few enough for a usable
// machine.
const verifyAtOnce = 4

// Verify reads every shard that is not verified yet, and compares its checksum.
func (c *Checkpoint) Verify(ctx context.Context) error {
	g, all := errgroup.WithContext(ctx)
	g.SetLimit(verifyAtOnce)
	for i := range c.shards {
		if c.shards[i].verified {
			continue
		}
		g.Go(func() error {
			return retry(nil, func() error { return c.verifyShard(all, i) })
		})
	}
	if err := g.Wait(); err != nil {
		if ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", ErrNotWhole, err)
		}
		return fmt.Errorf("%s: %w", c.Dir, err)
	}
	return nil
}

func (c *Checkpoint) verifyShard(ctx context.Context, i int) error {
	info := c.Manifest.Files[i]
	f, err := c.openRegular(info.Name)
	if err != nil {
		return err
	}
	_, err = readHeader(f, info) // fast, while the checksum of another file may take hours
	if err == nil {
		err = verify(ctx, f, info)
	}
	c.shards[i].verified = err == nil
	return errors.Join(err, f.Close())
}

// verify compares size and checksum of an open shard with the manifest.
func verify(ctx context.Context, f file, want FileInfo) error {
	h := sha256.New()
	n, err := io.Copy(&contextWriter{ctx: ctx, w: h}, f)
	if err != nil {
		return fmt.Errorf("%s: %w", want.Name, err)
	}
	if n != want.Bytes {
		return fmt.Errorf("%s: %d bytes, the manifest says %d", want.Name, n, want.Bytes)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want.SHA256 {
		return fmt.Errorf("%s: checksum %.12s…, the manifest says %.12s…", want.Name, got, want.SHA256)
	}
	return nil
}
