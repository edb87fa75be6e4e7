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

// ErrNotWhole is the cause when something of a checkpoint is missing or is not as it was
// written.
var ErrNotWhole = errors.New("checkpoint is not whole")

// maxManifest and maxValues bound the memory that a manifest can take: its bytes, and the values in
// it. One of a thousand ranks, each with a part of a hundred buckets, has half of either.
const (
	maxManifest = 64 << 20
	maxValues   = 2 << 20
)

// Checkpoint is the open checkpoint in directory Dir, with its Manifest. While it is open, no run removes
// it. It is used from one goroutine.
type Checkpoint struct {
	Manifest *Manifest
	Dir      string

	pieces   map[string][]piece // by tensor name
	root     store              // no name in a manifest leads out of it
	manifest file               // holds the lock
	shards   []shard            // like Manifest.Files
}

// A shard is a file of a checkpoint, opened when it is first read.
type shard struct {
	f        file
	tensors  *safetensors.File
	verified bool // the checksum of f, or of a file of that name, was right
}

// Open opens the checkpoint in a directory. It reads the manifest and looks at the size of
// every shard; checksums are verified by Verify or, shard by shard, by the first read. The
// error is ErrNotWhole when something is missing, and ErrVersion when a newer cprun wrote it.
func Open(dir string) (*Checkpoint, error) {
	root, err := diskOf(files.OpenDir(dir))
	return fromRoot(dir, root, err)
}

// OpenWait opens a checkpoint that another process has said is there. Where other hosts write, what
// they have done is waited for until it is seen here.
func OpenWait(ctx context.Context, dir string) (c *Checkpoint, err error) {
	parent, err := diskOf(files.OpenDir(filepath.Dir(dir)))
	if err != nil {
		return nil, fmt.Errorf("checkpoints: %w", err)
	}
	defer parent.Close()
	return openWait(ctx, parent, filepath.Base(dir), longWait)
}

// openWait does what OpenTold does, in a directory that is open.
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

// fromRoot returns the checkpoint in a directory that was opened.
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
	if c.pieces, err = c.Manifest.index(); err != nil {
		return err
	}
	c.shards = make([]shard, len(c.Manifest.Files))
	for _, f := range c.Manifest.Files {
		if err := checkSize(c.root, f); err != nil {
			return err
		}
	}
	return nil
}

// checkSize looks at the size of a shard. One that seems to be another's is opened: only that asks a server
// what another host has written.
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
	st, err := c.root.Lstat(name) // no link either: a manifest names what lies beside it
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: %w", name, files.ErrIrregular)
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

// tensors returns a shard, opened and verified.
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

// closeShard closes a shard with a stale handle.
func (c *Checkpoint) closeShard(i int) {
	if s := &c.shards[i]; s.f != nil {
		s.f.Close()
		s.f, s.tensors = nil, nil
	}
}

// readHeader reads the header of a shard, which repeats the manifest.
func readHeader(f file, info FileInfo) (*safetensors.File, error) {
	t, err := safetensors.New(info.Name, f, info.Bytes)
	if err != nil {
		return nil, err
	}
	return t, checkTensors(t, info)
}

// checkTensors compares a shard's own header with the manifest.
func checkTensors(t *safetensors.File, info FileInfo) error {
	for _, e := range info.Entries {
		have, ok := t.Info(e.Tensor)
		if !ok || have.DType != safetensors.F32 || len(have.Shape) != 1 || int64(have.Shape[0]) != e.Length {
			return fmt.Errorf("%s: tensor %q is %s %v, the manifest says F32 [%d]", info.Name, e.Tensor, have.DType,
				have.Shape, e.Length)
		}
	}
	return nil
}

// dirOf returns the checkpoints directory that a path given by a user means: itself, or the one in
// a run directory.
func dirOf(path string) string {
	inside := filepath.Join(path, "checkpoints")
	if st, err := os.Stat(inside); err == nil && st.IsDir() {
		return inside
	}
	return path
}

// Load fills the fields with a checkpoint's data of a rank's range. The ranks that saved
// may have been any number with any ranges. params are the parameters of the model in its own
// flat space; elements that belong to none (padding) are left as they are. Parameters that do
// not match are all listed in the error. Only the parts of shards that are wanted are read,
// after the checksum of each shard that holds one.
func (c *Checkpoint) Load(ctx context.Context, params []Param, want Range, fields ...Field) error {
	if err := checkLayout(params, []Range{want}, fields); err != nil {
		return fmt.Errorf("%s: %w", c.Dir, err)
	}
	if err := compare(params, c.Manifest.Params); err != nil {
		return fmt.Errorf("%s: %w", c.Dir, err)
	}
	for _, p := range params {
		span, err := p.span()
		if err != nil {
			return err
		}
		part := span.overlap(want)
		if part.Len() <= 0 {
			continue
		}
		for _, f := range fields {
			dst := f.Data[part.Lo-want.Lo : part.Hi-want.Lo]
			if err := c.Read(ctx, p.Name, f.Name, part.Lo-span.Lo, dst); err != nil {
				return err
			}
		}
	}
	return nil
}

// Read fills dst with the elements of one field of one flattened parameter, from offset on.
// What it reads of damaged shards is ErrNotWhole.
func (c *Checkpoint) Read(ctx context.Context, param, field string, offset int64, dst []float32) error {
	if !slices.Contains(c.Manifest.Fields, field) {
		return fmt.Errorf("%s: no field %q; it holds %q", c.Dir, field, c.Manifest.Fields)
	}
	name := tensorName(param, field)
	pieces := c.pieces[name]
	// The pieces are in order and without gaps: the first that ends behind offset holds it.
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
			if transient(err) {
				c.closeShard(p.file)
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
