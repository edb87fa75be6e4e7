package checkpoint

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cprun/cprun/internal/safetensors"
)

// report is what a rank tells rank 0 of its part of a save.
type report struct {
	Rank   int       `json:"rank"`
	Step   int64     `json:"step"`
	Layout string    `json:"layout"` // checksum of parameters and fields, the same on every rank
	File   *FileInfo `json:"file"`   // nil for a rank that owns nothing
	Error  string    `json:"error,omitempty"`

	err error // what Error tells, on the rank itself
}

func (r report) encode() []byte {
	b, err := json.Marshal(r)
	if err != nil {
		panic(fmt.Sprintf("checkpoint: report of rank %d: %v", r.Rank, err)) // strings and integers alone
	}
	return b
}

// writeShard writes what this rank owns, and waits until it is on the disk.
func (s *Saver) writeShard(ctx context.Context, snap Snapshot) report {
	r := report{Rank: s.group.Rank(), Step: snap.Meta.Step}
	r.Layout, r.File, r.err = s.tryShard(ctx, snap)
	r.Error = errText(r.err)
	return r
}

func (s *Saver) tryShard(ctx context.Context, snap Snapshot) (string, *FileInfo, error) {
	if err := checkLayout(snap.Params, snap.Ranges, snap.Fields); err != nil {
		return "", nil, err
	}
	names := make([]string, len(snap.Fields))
	for i, f := range snap.Fields {
		names[i] = f.Name
	}
	layout, err := json.Marshal([]any{snap.Params, names})
	if err != nil {
		return "", nil, err
	}
	entries, tensors, err := shardOf(snap.Params, snap.Ranges, snap.Fields)
	if err != nil || len(entries) == 0 {
		return sum(string(layout)), nil, err
	}
	tmp := s.tmpDir(snap.Meta.Step)
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return "", nil, err
	}
	info := &FileInfo{
		Name:    fmt.Sprintf("shard-%05d-of-%05d.safetensors", s.group.Rank(), s.group.Size()),
		Entries: entries,
	}
	if err := s.writeFile(ctx, filepath.Join(tmp, info.Name), info, tensors); err != nil {
		return "", nil, fmt.Errorf("shard %s: %w", info.Name, err)
	}
	// Rank 0 syncs this directory too, but on a network file system each client has its own
	// idea of what is on the disk.
	return sum(string(layout)), info, safetensors.SyncDir(tmp)
}

// writeFile writes the tensors and sets the size and the checksum of info, which is computed
// on the way, so that the file is not read again.
func (s *Saver) writeFile(ctx context.Context, path string, info *FileInfo, tensors []safetensors.Entry) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	hash := sha256.New()
	c := &cancelled{ctx: ctx, w: io.MultiWriter(s.wrap(f), hash)}
	w := bufio.NewWriterSize(c, 1<<20)
	err = safetensors.Write(w, map[string]string{"format": "pt"}, tensors)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = s.at("shard written")
	}
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	info.Bytes, info.SHA256 = c.n, hex.EncodeToString(hash.Sum(nil))
	return s.at("shard synced")
}

// cancelled counts what passes, and refuses it once ctx has ended.
type cancelled struct {
	ctx context.Context
	w   io.Writer
	n   int64
}

func (c *cancelled) Write(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
