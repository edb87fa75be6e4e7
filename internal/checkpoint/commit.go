package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cprun/cprun/internal/safetensors"
)

// commit is rank 0's part of a save, after all ranks have written: check, write the manifest,
// give the directory its name. Either the checkpoint is whole afterwards, or there is an error
// and everything that was there before still is.
func (s *Saver) commit(snap Snapshot, own report, blobs [][]byte) error {
	tmp := s.tmpDir(snap.Meta.Step)
	if err := s.writeManifest(tmp, snap, own, blobs); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	name := dirName(snap.Meta.Step)
	if err := s.rename(tmp, filepath.Join(s.o.Dir, name)); err != nil {
		return err
	}
	if err := s.setLatest(name); err != nil {
		return fmt.Errorf("%s: %w", latestName, err)
	}
	s.clean(true)
	s.prune(snap.Meta.Step)
	return s.at("pruned")
}

func (s *Saver) writeManifest(tmp string, snap Snapshot, own report, blobs [][]byte) error {
	m := newManifest(snap.Meta, snap.Params, snap.Fields)
	var err error
	if m.Files, err = filesOf(own, blobs); err != nil {
		return err
	}
	if _, err := m.index(); err != nil {
		return fmt.Errorf("the ranks' ranges do not fit together: %w", err)
	}
	if err := s.at("gathered"); err != nil {
		return err
	}
	if err := checkDir(tmp, m); err != nil {
		return err
	}
	data, err := m.encode()
	if err != nil {
		return err
	}
	if err := writeSynced(filepath.Join(tmp, manifestName), data); err != nil {
		return err
	}
	if err := s.at("manifest written"); err != nil {
		return err
	}
	return safetensors.SyncDir(tmp)
}

// filesOf is the shards in the ranks' reports, or all that went wrong on any of them.
func filesOf(own report, blobs [][]byte) ([]FileInfo, error) {
	files := []FileInfo{}
	var errs []error
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
		case own.err == nil && (r.Rank != rank || r.Step != own.Step || r.Layout != own.Layout):
			err = fmt.Errorf("saves step %d of layout %.8s as rank %d, and rank 0 step %d of layout %.8s", r.Step, r.Layout, r.Rank, own.Step, own.Layout)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("rank %d: %w", rank, err))
		} else if r.File != nil {
			files = append(files, *r.File)
		}
	}
	return files, errors.Join(errs...)
}

// checkDir makes sure that rank 0 sees what the others say they wrote, and removes what an
// earlier attempt at the same step has left.
func checkDir(tmp string, m *Manifest) error {
	if err := os.MkdirAll(tmp, 0o755); err != nil { // a model without elements has no shard
		return err
	}
	sizes := map[string]int64{}
	for _, f := range m.Files {
		st, err := os.Stat(filepath.Join(tmp, f.Name))
		if err != nil {
			return fmt.Errorf("rank 0 does not see a shard that another rank wrote; the run directory must lie on a file system that all nodes share: %w", err)
		}
		if st.Size() != f.Bytes {
			return fmt.Errorf("shard %s has %d bytes for rank 0 and %d for the rank that wrote it", f.Name, st.Size(), f.Bytes)
		}
		sizes[f.Name] = f.Bytes
	}
	entries, err := os.ReadDir(tmp)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, ours := sizes[e.Name()]; !ours {
			err = errors.Join(err, os.RemoveAll(filepath.Join(tmp, e.Name())))
		}
	}
	return err
}

// rename gives a directory its name. A checkpoint of the same step, from before a run went
// back, is set aside for the moment in between.
func (s *Saver) rename(tmp, final string) error {
	aside := final + ".old-" + s.o.RunID
	err := os.Rename(final, aside)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		if err := s.at("set aside"); err != nil {
			return err
		}
	}
	if err := os.Rename(tmp, final); err != nil {
		return err
	}
	if err := s.at("renamed"); err != nil {
		return err
	}
	return safetensors.SyncDir(s.o.Dir)
}

// setLatest makes the file latest name a checkpoint.
func (s *Saver) setLatest(name string) error {
	path := filepath.Join(s.o.Dir, latestName)
	beside := path + ".tmp-" + s.o.RunID
	if err := writeSynced(beside, []byte(name+"\n")); err != nil {
		return err
	}
	if err := s.at("latest written"); err != nil {
		return err
	}
	if err := os.Rename(beside, path); err != nil {
		return err
	}
	if err := s.at("latest renamed"); err != nil {
		return err
	}
	return safetensors.SyncDir(s.o.Dir)
}
