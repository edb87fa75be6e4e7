package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/terminal"
)

// Options says how checkpoints are kept.
type Options struct {
	// Dir is the run's checkpoints directory, on a file system that all ranks share. It stays the
	// caller's, and open until Close.
	Dir *os.Root
	// RunID tells the attempts of a run apart, so that one cleans up what another left. All
	// ranks have the same; no other attempt has. Letters, digits, '-' and '_'.
	RunID string
	// Keep is how many of the newest whole checkpoints stay; 0 keeps all.
	Keep int
	// Async writes in the background. Otherwise Save returns when the checkpoint is whole.
	Async bool
	// Start is which start of the run this is, the same on all ranks.
	Start Start
	// Local is a directory of this node alone, "" for none: there a rank writes its shard first, and
	// Save needs its slices no longer. The shard is copied to Dir while training goes on.
	Local string
	// Locked says that the launcher of this process holds the lock of Dir.
	Locked bool
	// Beat is how often a rank that is still at the disk says so to the others, 2 seconds by
	// default. The group's deadline has to be longer: it meets a rank that says nothing.
	Beat time.Duration
	// Limit is how long a rank may be at the disk in one go, 2 hours by default.
	Limit time.Duration
	// Warn is told of what does not endanger a checkpoint, such as an old one that cannot be
	// removed. It is called on rank 0, from the background goroutine. Nil ignores it.
	Warn func(error)
}

// Start is one of the starts of a run, which a job makes once and again after each failure. Generation is
// its number among all of the run's, above those of all before; 0 takes the next. First is the generation
// of the first start of Job: one from there on that is another job's is of a newer job.
type Start struct {
	Job               string
	First, Generation int64
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
	dir     store // o.Dir, once more
	own     origin
	local   *localDir            // nil for none
	lock    *os.File             // rank 0 holds it until Close
	pending chan error           // of the save in the background; nil for none
	buffers map[string][]float32 // the copy that the background writes, by field

	generation int64 // of this start, on rank 0
	released   bool

	// Tests put faults here: at is called at named points of a save, and wrap stands before
	// the shard's file.
	at   func(point string) error
	wrap func(io.Writer) io.Writer
}

// Disk stands before the file of every shard. It changes nothing; a test that runs whole processes
// sets it to have disks that fail.
var Disk = func(w io.Writer) io.Writer { return w }

var runIDPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// NewSaver prepares the directory. On rank 0 it takes the directory's lock, unless that is
// taken, so that two runs cannot write there at once, and removes what dead runs have left
// half-written.
func NewSaver(group Group, o Options) (*Saver, error) {
	if o.Warn == nil {
		o.Warn = func(error) {}
	}
	if !runIDPattern.MatchString(o.RunID) {
		return nil, fmt.Errorf("checkpoints in %s: run id %q is not 1 to 64 letters, digits, '-' and '_'", o.Dir.Name(), o.RunID)
	}
	dir, err := duplicate(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("checkpoints: %w", err)
	}
	s := newSaver(group, o, dir)
	if o.Local != "" {
		s.local, err = openLocal(o.Local, fmt.Sprintf("%s-rank-%05d", o.RunID, group.Rank()))
		if err == nil && s.local.dir.Remote() && group.Rank() == 0 {
			o.Warn(fmt.Errorf("checkpoint.local: %s lies on a file system that other nodes may share; a disk of this node is faster", terminal.Name(o.Local)))
		}
	}
	if err == nil && group.Rank() == 0 {
		if !o.Locked {
			s.lock, err = Lock(o.Dir, o.Start.Job)
		}
		if err == nil {
			err = s.begin()
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("checkpoints: %w", advised(err)), s.Close())
	}
	return s, nil
}

func newSaver(group Group, o Options, dir store) *Saver {
	o.Beat, o.Limit = cmp.Or(o.Beat, defaultBeat), cmp.Or(o.Limit, defaultLimit)
	s := &Saver{o: o, group: group, dir: dir, generation: o.Start.Generation, buffers: map[string][]float32{}, own: newOrigin()}
	s.own.Job = cmp.Or(o.Start.Job, o.RunID)
	s.at, s.wrap = func(string) error { return nil }, Disk
	return s
}

// begin makes this start the newest, and takes from the older ones what they have not committed.
func (s *Saver) begin() error {
	if err := s.claim(); err != nil {
		return err
	}
	if err := s.clean(false); err != nil {
		return err
	}
	s.forget()
	return nil
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
		p, err := s.stage(ctx, snap)
		if s.local == nil {
			return s.finish(ctx, snap, p, err)
		}
		snap.Fields = fieldsOf(snap.Fields)
		s.background(func() error { return s.finish(ctx, snap, p, err) })
		return nil
	}
	if !snap.Owned {
		snap.Fields = slices.Clone(snap.Fields)
		for i, f := range snap.Fields {
			b := append(s.buffers[f.Name][:0], f.Data...)
			s.buffers[f.Name], snap.Fields[i].Data = b, b
		}
	}
	s.background(func() error {
		p, err := s.stage(ctx, snap)
		return s.finish(ctx, snap, p, err)
	})
	return nil
}

// background has a save go on beside training. Wait ends it.
func (s *Saver) background(save func() error) {
	pending := make(chan error, 1)
	s.pending = pending
	go func() { pending <- save() }()
}

// fieldsOf is the fields without their data.
func fieldsOf(fields []Field) []Field {
	bare := make([]Field, len(fields))
	for i, f := range fields {
		bare[i].Name = f.Name
	}
	return bare
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

// Ended reports whether there is no save in the background that goes on. Wait then returns at once.
func (s *Saver) Ended() bool { return s.pending == nil || len(s.pending) > 0 }

// Leave waits like Wait, but at most for d: a disk that hangs must not keep a rank that has failed
// from saying so. The save in the background is lost where it has not ended by then; where it has, the
// saver is closed.
func (s *Saver) Leave(d time.Duration) (ended bool, err error) {
	if s.pending == nil {
		return true, s.release()
	}
	select {
	case err := <-s.pending:
		s.pending = nil
		return true, errors.Join(err, s.release())
	case <-time.After(d):
		s.pending = nil
		return false, nil
	}
}

// Close waits for the save in the background and releases the directory.
func (s *Saver) Close() error {
	return errors.Join(s.Wait(), s.release())
}

// release gives back what the saver holds, once. A disk that has hung may still be at it, and then finds
// the directories closed.
func (s *Saver) release() error {
	if s.released {
		return nil
	}
	s.released = true
	errs := []error{s.dir.Close(), s.local.close()}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(errs...)
}

// tmpName is where a step is written before it has its name.
func (s *Saver) tmpName(step int64) string { return dirName(step) + ".tmp-" + s.o.RunID }
