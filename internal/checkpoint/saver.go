package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
)

// Options says how checkpoints are kept.
type Options struct {
	// Dir is the run's checkpoints directory, on a file system that all ranks share. It is
	// made if need be.
	Dir string
	// RunID tells the attempts of a run apart, so that one cleans up what another left. All
	// ranks have the same; no other attempt has. Letters, digits, '-' and '_'.
	RunID string
	// Keep is how many of the newest whole checkpoints stay; 0 keeps all.
	Keep int
	// Async writes in the background. Otherwise Save returns when the checkpoint is whole.
	Async bool
	// Locked says that the launcher of this process holds the lock of Dir.
	Locked bool
	// Warn is told of what does not endanger a checkpoint, such as an old one that cannot be
	// removed. It is called on rank 0, from the background goroutine. Nil ignores it.
	Warn func(error)
}

// Snapshot is the state of one rank at one step. Meta, Params and the names of Fields are the
// same on every rank; the ranges of all ranks together cover every parameter exactly once.
type Snapshot struct {
	Meta   Meta
	Params []Param // not to be changed by the caller after Save
	// Ranges are what this rank saves, in ascending order. A parameter lies in at most one
	// of them, whole or in part.
	Ranges []Range
	Fields []Field // each the elements of all ranges, one after the other
	// Owned says that the slices of Fields stay as they are until the save has ended, so that
	// a save in the background needs no copy of them.
	Owned bool
}

// Saver writes the checkpoints of one rank of a run. Save, Wait and Close are called from one
// goroutine, and Save by all ranks of the group for the same steps.
type Saver struct {
	o       Options
	group   Group
	lock    *os.File             // rank 0 holds it until Close
	pending chan error           // of the save in the background; nil for none
	buffers map[string][]float32 // the copy that the background writes, by field

	// Tests put faults here: at is called at named points of a save, and wrap stands before
	// the shard's file.
	at   func(point string) error
	wrap func(io.Writer) io.Writer
}

var runIDPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// NewSaver prepares the directory. On rank 0 it takes the directory's lock, unless that is
// taken, so that two runs cannot write there at once, and removes what dead runs have left
// half-written.
func NewSaver(group Group, o Options) (*Saver, error) {
	if !runIDPattern.MatchString(o.RunID) {
		return nil, fmt.Errorf("checkpoints in %s: run id %q is not 1 to 64 letters, digits, '-' and '_'", o.Dir, o.RunID)
	}
	if o.Warn == nil {
		o.Warn = func(error) {}
	}
	s := &Saver{o: o, group: group, buffers: map[string][]float32{}, at: func(string) error { return nil }, wrap: func(w io.Writer) io.Writer { return w }}
	if group.Rank() != 0 {
		return s, nil
	}
	if !o.Locked {
		var err error
		if s.lock, err = Lock(o.Dir); err != nil {
			return nil, fmt.Errorf("checkpoints: %w", err)
		}
	}
	s.clean(false)
	return s, nil
}

// Save writes a checkpoint. It first waits for the one before and returns that one's error,
// if it had one, without beginning another: a run whose checkpoints cannot be written must
// hear of it. All ranks get an error when one has it.
//
// An asynchronous Save returns when the state is copied, or at once where it is Owned; else the
// slices may then be changed. ctx covers the writing too, so it is the run's and not the step's.
func (s *Saver) Save(ctx context.Context, snap Snapshot) error {
	if err := s.Wait(); err != nil {
		return err
	}
	if !s.o.Async {
		return s.save(ctx, snap)
	}
	if !snap.Owned {
		snap.Fields = slices.Clone(snap.Fields)
		for i, f := range snap.Fields {
			b := append(s.buffers[f.Name][:0], f.Data...)
			s.buffers[f.Name], snap.Fields[i].Data = b, b
		}
	}
	pending := make(chan error, 1)
	s.pending = pending
	go func() { pending <- s.save(ctx, snap) }()
	return nil
}

// Wait waits for the save in the background and returns its error, once.
func (s *Saver) Wait() error {
	if s.pending == nil {
		return nil
	}
	err := <-s.pending
	s.pending = nil
	return err
}

// Close waits for the save in the background and releases the directory.
func (s *Saver) Close() error {
	err := s.Wait()
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
		s.lock = nil
	}
	return err
}

// tmpDir is where a step is written before it has its name.
func (s *Saver) tmpDir(step int64) string {
	return filepath.Join(s.o.Dir, dirName(step)+".tmp-"+s.o.RunID)
}

// save is one rank's part of a save, all of it: write the own shard, tell rank 0 of it, hear
// from rank 0 how it ended. A rank whose part went wrong takes part in both collectives all
// the same, since the others wait for it there.
func (s *Saver) save(ctx context.Context, snap Snapshot) error {
	r := s.writeShard(ctx, snap)
	blobs, err := s.group.Gather(ctx, r.encode())
	if err != nil {
		return fmt.Errorf("checkpoint of step %d: gather of what the ranks wrote: %w", snap.Meta.Step, err)
	}
	var result verdict
	if s.group.Rank() == 0 {
		result.err = s.commit(snap, r, blobs)
		result.Error = errText(result.err)
	}
	blob, err := s.group.Broadcast(ctx, result.encode())
	if err == nil && s.group.Rank() != 0 {
		err = json.Unmarshal(blob, &result)
	}
	switch {
	case result.err != nil: // rank 0 has the error itself, with its causes
		err = result.err
	case err != nil:
		err = fmt.Errorf("word from rank 0 that it is whole: %w", err)
	case r.err != nil: // so has the rank whose part went wrong
		err = r.err
	case result.Error != "":
		err = errors.New(result.Error)
	default:
		return nil
	}
	return fmt.Errorf("checkpoint of step %d: %w", snap.Meta.Step, err)
}

// verdict is how rank 0 tells the others whether the checkpoint is whole.
type verdict struct {
	Error string `json:"error"`
	err   error  // what Error tells, on rank 0
}

func (v verdict) encode() []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("checkpoint: verdict: %v", err)) // a string alone
	}
	return b
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
