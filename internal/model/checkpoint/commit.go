package checkpoint

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// commit completes a save on rank 0, after all ranks have written: it checks the shards, writes the manifest and
// renames the directory. On a fault all earlier checkpoints stay.
func (s *Saver) commit(ctx context.Context, snap Snapshot, own report, blobs [][]byte) faults {
	tmp := s.tmpName(snap.Meta.Step)
	written, fs := filesOf(own, blobs)
	if len(fs) > 0 {
		if err := retry(s.dir, func() error { return s.dir.RemoveAll(tmp) }); err != nil {
			s.o.Warn(fmt.Errorf("remains of a save: %w", err))
		}
		return fs
	}
	if err := s.complete(ctx, tmp, snap, written); err != nil {
		return faults{{0, withFix(err)}}
	}
	return nil
}

// complete makes a checkpoint of the ranks' files in tmp. It checks for a newer start between manifest and rename: such
// a start has removed tmp, or complete sees its record.
func (s *Saver) complete(ctx context.Context, tmp string, snap Snapshot, written []FileInfo) error {
	if err := s.writeManifest(ctx, tmp, snap, written); err != nil {
		return errors.Join(err, s.dir.RemoveAll(tmp))
	}
	if err := s.fence.check(); err != nil {
		return errors.Join(err, s.dir.RemoveAll(tmp))
	}
	name := dirName(snap.Meta.Step)
	if err := s.rename(tmp, name); err != nil {
		return errors.Join(err, s.dir.RemoveAll(tmp))
	}
	pointers := []string{latestName}
	if snap.Best {
		pointers = []string{bestName, latestName} // a start from latest knows its best
	}
	for _, pointer := range pointers {
		if err := s.point(pointer, name); err != nil {
			return fmt.Errorf("%s: %w", pointer, err)
		}
	}
	if err := s.clean(true); err != nil {
		s.o.Warn(err)
	}
	s.prune(snap.Meta.Step)
	return s.at("pruned")
}

func (s *Saver) writeManifest(ctx context.Context, tmp string, snap Snapshot, written []FileInfo) error {
	m := newManifest(snap.Meta, snap.Params, snap.Fields)
	m.Files, m.Generation = written, s.fence.start.Generation
	if _, err := m.index(); err != nil {
		return fmt.Errorf("the ranks' parts do not make the whole state: %w", err)
	}
	if err := s.at("gathered"); err != nil {
		return err
	}
	dir, err := s.dir.Sub(tmp) // a model without elements has no shard
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := checkDir(ctx, dir, m); err != nil {
		return err
	}
	data, err := m.encode()
	if err != nil {
		return err
	}
	if err := s.writeSynced(dir, manifestName, data, func() error { return nil }); err != nil {
		return err
	}
	if err := s.at("manifest written"); err != nil {
		return err
	}
	return retry(dir, dir.Sync)
}

// tempName returns a fresh name for an incomplete file, with the RunID of its owner.
func (s *Saver) tempName(name string) string {
	return fmt.Sprintf("%s.tmp-%s.%s", name, s.o.RunID, rand.Text())
}

// writeSynced writes a file under a temporary name, syncs it, calls between, and renames it.
func (s *Saver) writeSynced(dir store, name string, data []byte, between func() error) error {
	return retry(dir, func() error {
		d, err := dir.Create(s.tempName(name), name)
		if err != nil {
			return err
		}
		_, err = d.Write(data)
		if err == nil {
			err = d.Sync()
		}
		if err == nil {
			err = between()
		}
		if err != nil {
			return errors.Join(err, d.Discard())
		}
		return d.Commit()
	})
}

// filesOf returns the shards from the ranks' reports, or the faults of all ranks.
func filesOf(own report, blobs [][]byte) ([]FileInfo, faults) {
	files := []FileInfo{}
	var fs faults
	for rank, blob := range blobs {
		var r report
		err := json.Unmarshal(blob, &r)
		switch {
		case err != nil:
			err = fmt.Errorf("report: %w", err)
		case rank == own.Rank:
			err = own.err // the error itself, with its causes
		case r.Error != "":
			err = errors.New(r.Error)
		case own.err == nil && (r.Rank != rank || r.Run != own.Run || r.Step != own.Step || r.Layout != own.Layout):
			err = fmt.Errorf("saves step %d of layout %.8s as rank %d of start %.64s, and rank 0 step %d of layout "+
				"%.8s of start %s", r.Step, r.Layout, r.Rank, r.Run, own.Step, own.Layout, own.Run)
		}
		if err != nil {
			fs = append(fs, &RankError{rank, err})
		} else if r.File != nil {
			files = append(files, *r.File)
		}
	}
	return files, fs
}

// checkDir checks that rank 0 sees the reported files, and removes all others, which an earlier attempt at the step
// left.
func checkDir(ctx context.Context, tmp store, m *Manifest) error {
	ours := map[string]bool{}
	for _, f := range m.Files {
		ours[f.Name] = true
		err := awaitVisible(ctx, tmp, longWait, func() error { return checkSize(tmp, f) })
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("rank 0 does not see a shard that another rank wrote; the run directory must lie on a "+
				"file system that all nodes share: %w", err)
		}
		if err != nil {
			return err
		}
	}
	entries, err := tmp.List()
	if err != nil {
		return err
	}
	for _, e := range entries {
		// An NFS client renames an open file to .nfs… when it is removed. It disappears when it is closed.
		if !ours[e.Name()] && !strings.HasPrefix(e.Name(), ".nfs") {
			err = errors.Join(err, tmp.RemoveAll(e.Name()))
		}
	}
	return err
}

// rename gives a directory its final name. It sets an existing checkpoint of the same step aside meanwhile, as after a
// resume from an older step.
func (s *Saver) rename(tmp, final string) error {
	aside := final + ".old-" + s.o.RunID
	err := s.dir.Rename(final, aside)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	moved := err == nil
	if moved {
		if err := s.at("set aside"); err != nil {
			return err
		}
	}
	if err := retry(s.dir, func() error { return s.dir.Rename(tmp, final) }); err != nil {
		if moved {
			err = errors.Join(err, s.dir.Rename(aside, final))
		}
		return err
	}
	if err := s.at("renamed"); err != nil {
		return err
	}
	return retry(s.dir, s.dir.Sync)
}

// point makes a file, latest or best, name a checkpoint.
func (s *Saver) point(pointer, name string) error {
	err := s.writeSynced(s.dir, pointer, []byte(name+"\n"), func() error {
		return errors.Join(s.fence.check(), s.at(pointer+" written"))
	})
	if err != nil {
		return err
	}
	if err := s.at(pointer + " renamed"); err != nil {
		return err
	}
	return retry(s.dir, s.dir.Sync)
}

const (
	defaultBeat  = 2 * time.Second
	defaultLimit = 2 * time.Hour // hundreds of gigabytes on a slow file system
)

// OnAllRanks runs work on every rank of a group, for up to limit, and returns when all ranks are done. Busy ranks
// report at every beat, so that the group's deadline does not fire for slow disks. It returns an error of the rank's
// own work at once; the caller must inform the others. After another error work may continue until ctx ends. 0 selects
// the defaults of a Saver.
func OnAllRanks(ctx context.Context, c comm.Communicator, beat, limit time.Duration, work func() error) error {
	beat, limit = cmp.Or(beat, defaultBeat), cmp.Or(limit, defaultLimit)
	done := make(chan error, 1)
	go func() { done <- work() }() // ends with work
	tick := time.NewTicker(beat)
	defer tick.Stop()
	began := time.Now()
	for mine := false; ; {
		if !mine {
			select {
			case err := <-done:
				if err != nil {
					return err
				}
				mine = true
			case <-tick.C:
				if time.Since(began) > limit {
					return fmt.Errorf("the disk has not done its part in %v", limit)
				}
			}
		}
		if all, err := (ranks{c}).all(ctx, mine); err != nil || all {
			return err
		}
	}
}

// ranks sends byte strings over a communicator of tensors. A Saver uses it during training steps, so it must be a
// separate communicator (a Split of the world).
type ranks struct{ comm.Communicator }

// maxBlob bounds the memory that a peer's announced length can claim. A shard's part of a manifest is far smaller.
const maxBlob = 1 << 30

func (r ranks) sizes(ctx context.Context, n int) ([]int64, error) {
	own, all := tensor.FromSlice([]int64{int64(n)}, 1), tensor.New(tensor.I64, r.Size())
	if err := comm.Finish(ctx)(r.AllGather(all, own)); err != nil {
		return nil, err
	}
	sizes := tensor.Data[int64](all)
	for rank, n := range sizes {
		if n < 0 || n > maxBlob {
			return nil, fmt.Errorf("rank %d announces %d bytes", rank, n)
		}
	}
	return sizes, nil
}

// gather collects every rank's blob on rank 0, in rank order; other ranks get nil.
func (r ranks) gather(ctx context.Context, blob []byte) ([][]byte, error) {
	sizes, err := r.sizes(ctx, len(blob))
	if err != nil {
		return nil, err
	}
	var send, recv []comm.Message
	out := [][]byte{blob}
	if r.Rank() != 0 && len(blob) > 0 {
		send = append(send, comm.Message{Peer: 0, View: tensor.FromSlice(blob, len(blob))})
	}
	for peer := 1; peer < r.Size() && r.Rank() == 0; peer++ {
		v := tensor.New(tensor.U8, int(sizes[peer]))
		if out = append(out, tensor.Bytes(v)); sizes[peer] > 0 {
			recv = append(recv, comm.Message{Peer: peer, View: v})
		}
	}
	if err := comm.Finish(ctx)(r.Exchange(send, recv)); err != nil || r.Rank() != 0 {
		return nil, err
	}
	return out, nil
}

// Broadcast sends root's blob to every rank. It ignores the other blobs.
func Broadcast(ctx context.Context, c comm.Communicator, root int, blob []byte) ([]byte, error) {
	sizes, err := ranks{c}.sizes(ctx, len(blob))
	if err != nil || sizes[root] == 0 {
		return nil, err
	}
	v := tensor.New(tensor.U8, int(sizes[root]))
	if c.Rank() == root {
		copy(tensor.Bytes(v), blob)
	}
	return tensor.Bytes(v), comm.Finish(ctx)(c.Broadcast(v, root))
}

// all returns on every rank whether all ranks passed true. Every rank must call it.
func (r ranks) all(ctx context.Context, yes bool) (bool, error) {
	v := tensor.New(tensor.I64, 1)
	if yes {
		tensor.Data[int64](v)[0] = 1
	}
	err := comm.Finish(ctx)(r.AllReduce(v, comm.Min))
	return err == nil && tensor.Data[int64](v)[0] == 1, err
}
