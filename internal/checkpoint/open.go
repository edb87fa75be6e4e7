package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/safetensors"
)

// ErrNotWhole is the cause when something of a checkpoint is missing or is not as it was
// written.
var ErrNotWhole = errors.New("checkpoint is not whole")

// maxManifest bounds the memory that a damaged manifest can take, in bytes. A manifest of a
// thousand shards of a thousand parameters has a tenth of it.
const maxManifest = 1 << 30

// Checkpoint is an open checkpoint. While it is open, no run removes it. It is used from one
// goroutine.
type Checkpoint struct {
	Manifest *Manifest
	Dir      string

	pieces   map[string][]piece // by tensor name
	root     *os.Root           // no name in a manifest leads out of it
	manifest *os.File           // holds the lock
	shards   []shard            // like Manifest.Files
}

// shard is a file of a checkpoint, opened when it is first read.
type shard struct {
	f        *os.File
	tensors  *safetensors.File
	verified bool // the checksum of f, or of a file of that name, was right
}

// Open opens the checkpoint in a directory. It reads the manifest and looks at the size of
// every shard; checksums are verified by Verify or, shard by shard, by the first read. The
// error is ErrNotWhole when something is missing, and ErrVersion when a newer cprun wrote it.
func Open(dir string) (*Checkpoint, error) {
	c := &Checkpoint{Dir: dir}
	if err := c.open(); err != nil {
		c.Close()
		if !errors.Is(err, ErrVersion) {
			err = fmt.Errorf("%w: %w", ErrNotWhole, err)
		}
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return c, nil
}

func (c *Checkpoint) open() error {
	var err error
	if c.root, err = os.OpenRoot(c.Dir); err != nil {
		return err
	}
	if c.manifest, err = c.regular(manifestName); err != nil {
		return err
	}
	if err := lockFile(c.manifest, syscall.LOCK_SH); err != nil {
		return fmt.Errorf("%s: %w, which removes it", manifestName, err)
	}
	data, err := io.ReadAll(io.LimitReader(c.manifest, maxManifest))
	if err != nil {
		return fmt.Errorf("%s: %w", manifestName, err)
	}
	if c.Manifest, err = ParseManifest(data); err != nil {
		return err
	}
	name, _, _ := strings.Cut(filepath.Base(c.Dir), ".old-")
	if dirPattern.MatchString(name) && name != dirName(c.Manifest.Step) {
		return fmt.Errorf("%s: it is of step %d, which is not the directory's", manifestName, c.Manifest.Step)
	}
	if c.pieces, err = c.Manifest.index(); err != nil {
		return err
	}
	c.shards = make([]shard, len(c.Manifest.Files))
	for _, f := range c.Manifest.Files {
		st, err := c.root.Lstat(f.Name)
		switch {
		case err != nil:
			return err
		case !st.Mode().IsRegular():
			return fmt.Errorf("%s: not a regular file", f.Name)
		case st.Size() != f.Bytes:
			return fmt.Errorf("%s: %d bytes, the manifest says %d", f.Name, st.Size(), f.Bytes)
		}
	}
	return nil
}

// regular opens a regular file of the checkpoint.
func (c *Checkpoint) regular(name string) (*os.File, error) {
	st, err := c.root.Lstat(name) // a pipe would block an open
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file", name)
	}
	return c.root.Open(name)
}

// Close closes the files and lets runs remove the checkpoint again.
func (c *Checkpoint) Close() error {
	var errs []error
	for i := range c.shards {
		if f := c.shards[i].f; f != nil {
			errs = append(errs, f.Close())
			c.shards[i].f = nil
		}
	}
	if c.manifest != nil {
		errs = append(errs, c.manifest.Close())
	}
	if c.root != nil {
		errs = append(errs, c.root.Close())
	}
	return errors.Join(errs...)
}

// verifyAtOnce is how many shards are hashed in parallel: enough to keep a disk busy, few
// enough to leave a machine usable.
const verifyAtOnce = 4

// Verify reads every shard that was not verified yet and compares its checksum.
func (c *Checkpoint) Verify(ctx context.Context) error {
	g, all := errgroup.WithContext(ctx)
	g.SetLimit(verifyAtOnce)
	for i := range c.shards {
		if c.shards[i].verified {
			continue
		}
		g.Go(func() error {
			f, err := c.regular(c.Manifest.Files[i].Name)
			if err == nil {
				err = errors.Join(c.verify(all, f, c.Manifest.Files[i]), f.Close())
			}
			c.shards[i].verified = err == nil
			return err
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

// verify compares the size and the checksum of an open shard with the manifest's.
func (c *Checkpoint) verify(ctx context.Context, f *os.File, want FileInfo) error {
	h := sha256.New()
	n, err := io.Copy(&cancelled{ctx: ctx, w: h}, f)
	if err != nil {
		return fmt.Errorf("%s: %w", want.Name, err)
	}
	if n != want.Bytes {
		return fmt.Errorf("%s: %d bytes, the manifest says %d", want.Name, n, want.Bytes)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want.SHA256 {
		return fmt.Errorf("%s: its checksum is %.12s…, the manifest says %.12s…", want.Name, got, want.SHA256)
	}
	return nil
}

// tensors is a shard, opened and verified.
func (c *Checkpoint) tensors(ctx context.Context, i int) (*safetensors.File, error) {
	s, info := &c.shards[i], c.Manifest.Files[i]
	if s.tensors != nil {
		return s.tensors, nil
	}
	f, err := c.regular(info.Name)
	if err != nil {
		return nil, err
	}
	if !s.verified {
		err = c.verify(ctx, f, info)
	}
	var t *safetensors.File
	if err == nil {
		t, err = safetensors.New(info.Name, f, info.Bytes)
	}
	if err == nil {
		err = checkTensors(t, info)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	s.f, s.tensors, s.verified = f, t, true
	return t, nil
}

// checkTensors compares a shard's own header with the manifest.
func checkTensors(t *safetensors.File, info FileInfo) error {
	for _, e := range info.Entries {
		have, ok := t.Info(e.Tensor)
		if !ok || have.DType != safetensors.F32 || len(have.Shape) != 1 || int64(have.Shape[0]) != e.Length {
			return fmt.Errorf("%s: tensor %q is %s %v, the manifest says F32 [%d]", info.Name, e.Tensor, have.DType, have.Shape, e.Length)
		}
	}
	return nil
}

// dirOf is the checkpoints directory that a path given by a user means: itself, or the one in
// a run directory.
func dirOf(path string) string {
	inside := filepath.Join(path, "checkpoints")
	if st, err := os.Stat(inside); err == nil && st.IsDir() {
		return inside
	}
	return path
}
