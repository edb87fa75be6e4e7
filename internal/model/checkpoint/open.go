package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
)

// ErrNotWhole reports a checkpoint with a missing or changed part.
var ErrNotWhole = errors.New("checkpoint is not whole")

// maxManifest and maxValues bound the memory of a manifest: its bytes and its values. With a thousand ranks of a
// hundred buckets, a manifest has half of either.
const (
	maxManifest = 64 << 20
	maxValues   = 2 << 20
)

// Checkpoint is an open checkpoint in directory Dir, with its Manifest. No run removes it while it is open. It is for
// one goroutine.
type Checkpoint struct {
	Manifest *Manifest
	Dir      string

	root     store   // names in a manifest cannot lead out of it
	manifest file    // holds the lock
	shards   []shard // like Manifest.Files
}

// A shard is a file of a checkpoint, opened on first read.
type shard struct {
	f        file
	tensors  *safetensors.File
	verified bool // the checksum of a file of that name was right
}

// Open opens the checkpoint in a directory. It reads the manifest and checks the size of every shard; Verify or the
// first read of a shard checks its checksum. The error is ErrNotWhole for a missing part, and ErrVersion for a
// checkpoint of a newer cprun.
func Open(dir string) (*Checkpoint, error) {
	root, err := diskOf(files.OpenDir(dir))
	return fromRoot(dir, root, err)
}

// OpenWait opens a checkpoint that another process has reported. On a shared file system it waits until the files are
// visible here.
func OpenWait(ctx context.Context, dir string) (c *Checkpoint, err error) {
	parent, err := diskOf(files.OpenDir(filepath.Dir(dir)))
	if err != nil {
		return nil, fmt.Errorf("checkpoints: %w", err)
	}
	defer parent.Close()
	return openWait(ctx, parent, filepath.Base(dir), longWait)
}

// openWait opens a checkpoint like OpenWait, in an open directory.
func openWait(ctx context.Context, dir store, name string, limit time.Duration) (c *Checkpoint, err error) {
	err = awaitVisible(ctx, dir, limit, func() error {
		c, err = openIn(dir, name)
		return err
	})
	return c, err
}

func openIn(dir store, name string) (c *Checkpoint, err error) {
	err = retry(dir, func() error {
		root, bad := dir.Dir(name)
		c, err = fromRoot(pathOf(dir, name), root, bad)
		return err
	})
	return c, err
}

// fromRoot returns the checkpoint in an open directory.
func fromRoot(dir string, root store, err error) (*Checkpoint, error) {
	c := &Checkpoint{Dir: dir, root: root}
	if err == nil {
		err = c.open()
	}
	if err != nil {
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
	if c.manifest, err = c.openRegular(manifestName); err != nil {
		return err
	}
	if err := lockFile(c.manifest, syscall.LOCK_SH); err != nil {
		return fmt.Errorf("%s: %w, which removes it", manifestName, err)
	}
	data, err := files.All(c.manifest, maxManifest)
	if err != nil {
		return fmt.Errorf("%s: %w", manifestName, err)
	}
	if c.Manifest, err = ParseManifest(data); err != nil {
		return err
	}
	name, _, _ := strings.Cut(filepath.Base(c.Dir), ".old-")
	if dirPattern.MatchString(name) && name != dirName(c.Manifest.Step) {
		return fmt.Errorf("%s: its step is %d, not that of the directory's name", manifestName, c.Manifest.Step)
	}
	c.shards = make([]shard, len(c.Manifest.Files))
	for _, f := range c.Manifest.Files {
		if err := checkSize(c.root, f); err != nil {
			return err
		}
	}
	return nil
}

// checkSize checks the size of a shard. It opens a file of unexpected size, since only open makes an NFS client ask the
// server.
func checkSize(dir store, want FileInfo) error {
	st, err := dir.Lstat(want.Name)
	if dir.Remote() && (errors.Is(err, fs.ErrNotExist) || err == nil && st.Mode().IsRegular() &&
		st.Size() != want.Bytes) {
		var f file
		if f, err = dir.Open(want.Name); err == nil {
			st, err = f.Stat()
			f.Close()
		}
	}
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%s: not a regular file", want.Name)
	case st.Size() != want.Bytes:
		return &staleView{fmt.Errorf("%s: %d bytes, the manifest says %d", want.Name, st.Size(), want.Bytes)}
	}
	return nil
}

func (c *Checkpoint) openRegular(name string) (file, error) {
	st, err := c.root.Lstat(name) // a link is refused: a manifest names files beside it
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: %w", name, files.ErrIrregular)
	}
	return c.root.Open(name)
}

// Close closes the files. Runs may then remove the checkpoint.
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

// tensors returns an open and verified shard.
func (c *Checkpoint) tensors(ctx context.Context, i int) (*safetensors.File, error) {
	s, info := &c.shards[i], c.Manifest.Files[i]
	if s.tensors != nil {
		return s.tensors, nil
	}
	f, err := c.openRegular(info.Name)
	if err != nil {
		return nil, err
	}
	t, err := readHeader(f, info)
	if err == nil && !s.verified {
		err = verify(ctx, f, info)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	s.f, s.tensors, s.verified = f, t, true
	return t, nil
}

// readHeader reads the header of a shard and compares it with the manifest.
func readHeader(f file, info FileInfo) (*safetensors.File, error) {
	t, err := safetensors.New(info.Name, f, info.Bytes)
	if err != nil {
		return nil, err
	}
	for _, e := range info.Entries {
		have, ok := t.Info(e.Tensor)
		if !ok || have.DType != safetensors.F32 || len(have.Shape) != 1 || int64(have.Shape[0]) != e.Length {
			return t, fmt.Errorf("%s: tensor %q is %s %v, the manifest says F32 [%d]", info.Name, e.Tensor, have.DType,
				have.Shape, e.Length)
		}
	}
	return t, nil
}

// dirOf returns the checkpoints directory for a user's path: the path itself, or the directory inside a run directory.
func dirOf(path string) string {
	inside := filepath.Join(path, "checkpoints")
	if st, err := os.Stat(inside); err == nil && st.IsDir() {
		return inside
	}
	return path
}

// Read fills dst with elements of one field of a flattened parameter, starting at offset. For a damaged shard the error
// is ErrNotWhole.
func (c *Checkpoint) Read(ctx context.Context, param, field string, offset int64, dst []float32) error {
	if !slices.Contains(c.Manifest.Fields, field) {
		return fmt.Errorf("%s: no field %q; it holds %q", c.Dir, field, c.Manifest.Fields)
	}
	name := tensorName(param, field)
	pieces := c.Manifest.pieces[name]
	// The pieces are ordered without gaps: the first one that ends after offset holds it.
	at := sort.Search(len(pieces), func(i int) bool { return pieces[i].offset+pieces[i].length > offset })
	for len(dst) > 0 {
		if offset < 0 || at == len(pieces) {
			return fmt.Errorf("%s: %s: element %d is outside the parameter", c.Dir, name, offset)
		}
		p := pieces[at]
		n := min(int64(len(dst)), p.offset+p.length-offset)
		err := retry(c.root, func() error {
			t, err := c.tensors(ctx, p.file)
			if err == nil {
				err = t.ReadFloat32(name, dst[:n], offset-p.offset)
			}
			if s := &c.shards[p.file]; transient(err) && s.f != nil { // a stale handle
				s.f.Close()
				s.f, s.tensors = nil, nil
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", ErrNotWhole, err)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c.Dir, err)
		}
		dst, offset, at = dst[n:], offset+n, at+1
	}
	return nil
}
