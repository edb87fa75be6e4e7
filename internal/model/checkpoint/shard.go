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

	"github.com/cprun/cprun/internal/base/safetensors"
)

// A report describes a rank's part of a save to rank 0.
type report struct {
	Rank   int       `json:"rank"`
	Run    string    `json:"run"` // RunID: unique to this start
	Step   int64     `json:"step"`
	Layout string    `json:"layout"` // checksum of parameters and fields, the same on every rank
	File   *FileInfo `json:"file"`   // nil for a rank without elements
	Error  string    `json:"error,omitempty"`

	err error // with its causes, on the rank itself
}

func (s *Saver) writeShard(ctx context.Context, snap Snapshot) report {
	r := report{Rank: s.group.Rank(), Run: s.o.RunID, Step: snap.Meta.Step}
	var err error
	r.Layout, r.File, err = s.tryShard(ctx, snap)
	r.err = withFix(err)
	r.Error = errText(r.err)
	return r
}

func (s *Saver) tryShard(ctx context.Context, snap Snapshot) (string, *FileInfo, error) {
	if snap.Err != nil {
		return "", nil, snap.Err
	}
	fields := snap.Fields
	if snap.Read != nil {
		fields = nil // without data
	}
	if err := checkLayout(snap.Params, snap.Ranges, fields); err != nil {
		return "", nil, err
	}
	if s.group.Rank() == 0 {
		if err := s.fence.check(); err != nil { // before the other ranks write for nothing
			return "", nil, err
		}
	}
	names := make([]string, len(snap.Fields))
	for i, f := range snap.Fields {
		names[i] = f.Name
	}
	layout, err := json.Marshal([]any{snap.Params, names})
	if err != nil {
		return "", nil, err
	}
	entries, tensors, err := shardOf(ctx, &snap)
	if err != nil || len(entries) == 0 {
		return sum(string(layout)), nil, err
	}
	info := &FileInfo{
		Name:    fmt.Sprintf("shard-%05d-of-%05d.safetensors", s.group.Rank(), s.group.Size()),
		Entries: entries,
	}
	err = s.inTemp(snap.Meta.Step, func(dir store) error { return s.writeFile(ctx, dir, info, tensors) })
	if err != nil {
		return "", nil, fmt.Errorf("shard %s: %w", info.Name, err)
	}
	return sum(string(layout)), info, nil
}

// inTemp calls f with the uncommitted directory of a step, and retries with a new handle if it is stale.
func (s *Saver) inTemp(step int64, f func(dir store) error) error {
	return retry(s.dir, func() error {
		tmp, err := s.dir.Sub(s.tmpName(step))
		if err != nil {
			return err
		}
		defer tmp.Close()
		if err := f(tmp); err != nil {
			return err
		}
		// Rank 0 also syncs this directory, but each client of a network file system must sync its own writes.
		return tmp.Sync()
	})
}

// writeFile writes the tensors and sets the size and checksum of info, computed during the write.
func (s *Saver) writeFile(ctx context.Context, dir store, info *FileInfo, tensors []safetensors.Entry) error {
	f, err := dir.Create(s.tempName(info.Name), info.Name)
	if err != nil {
		return err
	}
	hash := sha256.New()
	c := &contextWriter{ctx: ctx, w: io.MultiWriter(s.wrap(f), hash)}
	w := bufio.NewWriterSize(c, 1<<20)
	err = safetensors.Write(w, map[string]string{"format": "pt"}, tensors)
	if err == nil {
		err = w.Flush()
	}
	if err == nil {
		err = s.at("shard written")
	}
	if err != nil {
		return errors.Join(err, f.Discard())
	}
	if err := f.Commit(); err != nil {
		return err
	}
	info.Bytes, info.SHA256 = c.n, hex.EncodeToString(hash.Sum(nil))
	return s.at("shard synced")
}

// A contextWriter counts the written bytes, and fails once ctx has ended.
type contextWriter struct {
	ctx context.Context
	w   io.Writer
	n   int64
}

func (c *contextWriter) Write(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
