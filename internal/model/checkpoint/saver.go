package checkpoint

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm"
)

// Options configure a Saver.
type Options struct {
	// Dir is the run's checkpoints directory, on a file system that all ranks share. The caller owns it, and closes it
	// after Close. The launcher holds its Lock.
	Dir *os.Root
	// RunID identifies this attempt of the run, so that a later one can clean up. It is the same on all ranks and
	// differs between attempts. Letters, digits, '-' and '_'.
	RunID string
	// Keep is the number of newest complete checkpoints to keep; 0 keeps all.
	Keep int
	// Async writes in the background. Otherwise Save returns when the checkpoint is complete.
	Async bool
	// Start identifies this start of the run, the same on all ranks.
	Start Start
	// Beat is the interval at which a busy rank informs the others, 2 seconds by default. The group's deadline must be
	// longer.
	Beat time.Duration
	// Limit bounds one write of a rank, 2 hours by default.
	Limit time.Duration
	// Warn receives errors that do not endanger a checkpoint, such as a failed removal of an old one. Rank 0 calls it
	// from the background goroutine. nil ignores them.
	Warn func(error)
}

// Start identifies a start of a run. A job starts a run once, and again after each failure. Generation numbers the
// starts of a run in ascending order; 0 takes the next number. First is the generation of the job's first start: a
// higher number of another job is a newer job's.
type Start struct {
	Job               string
	First, Generation int64
	Claimed           bool // the launchers of the job have called Claim
}

// Snapshot is the state of one rank at one step. Meta, Params and the names of Fields are the same on every rank; the
// ranges of all ranks cover every parameter exactly once.
type Snapshot struct {
	Meta   Meta
	Params []Param // the caller must not change it after Save
	// Ranges lists the elements that this rank saves, in ascending order. A parameter is in at most one range,
	// completely or partly.
	Ranges []Range
	// Fields have the elements of all ranges, in order. Their slices must stay unchanged until the save has ended.
	Fields []Field
	// Read, if not nil, replaces Data of Fields, so that a save needs no copy of the state: it sets dst to the elements
	// of Fields[field] from index lo. The save calls it for at most PieceSize elements at a time.
	Read func(ctx context.Context, field int, lo int64, dst []float32) error
	// Best makes the file best name this checkpoint, and no longer an earlier one.
	Best bool
	// Err makes the save fail on every rank: this rank has no state to save.
	Err error
}

// Saver writes the checkpoints of one rank of a run. Call Save, Wait and Close from one goroutine, and Save on all
// ranks of the group for the same steps.
type Saver struct {
	o       Options
	group   ranks
	dir     store      // o.Dir, reopened
	fence   fence      // of this start, on rank 0
	pending chan error // result of the background save; nil for none

	released bool
	hung     bool // a write of this rank was left behind
	failed   bool // the last save returned a RetryError

	// Tests inject faults here: at is called at named points, and wrap wraps the shard's file.
	at   func(point string) error
	wrap func(io.Writer) io.Writer
}

// Disk wraps the file of every shard. Tests of whole processes replace it to inject disk failures.
var Disk = func(w io.Writer) io.Writer { return w }

var runIDPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// NewSaver prepares the directory. On rank 0 it removes incomplete files of ended runs.
//
// The group must be a separate communicator, since saves run during training steps. Its calls end with ctx, or when a
// peer is lost.
func NewSaver(group comm.Communicator, o Options) (*Saver, error) {
	if o.Warn == nil {
		o.Warn = func(error) {}
	}
	if !runIDPattern.MatchString(o.RunID) {
		return nil, fmt.Errorf("checkpoints in %s: run id %q is not 1 to 64 letters, digits, '-' and '_'", o.Dir.Name(),
			o.RunID)
	}
	dir, err := reopen(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("checkpoints: %w", err)
	}
	s := newSaver(group, o, dir)
	if group.Rank() == 0 {
		err = s.begin()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("checkpoints: %w", withFix(err)), s.Close())
	}
	return s, nil
}

func newSaver(group comm.Communicator, o Options, dir store) *Saver {
	o.Beat, o.Limit = cmp.Or(o.Beat, defaultBeat), cmp.Or(o.Limit, defaultLimit)
	o.Start.Job = cmp.Or(o.Start.Job, o.RunID)
	s := &Saver{o: o, group: ranks{group}, dir: dir, fence: newFence(dir, o.Start)}
	s.at, s.wrap = func(string) error { return nil }, Disk
	return s
}

// begin makes this start the newest, and removes uncommitted files of older starts.
func (s *Saver) begin() error {
	var err error
	if s.o.Start.Claimed {
		err = awaitVisible(context.Background(), s.dir, longWait, s.fence.check)
	} else {
		err = s.fence.claim(nil)
	}
	if err != nil {
		return err
	}
	if err := s.clean(false); err != nil {
		return err
	}
	if err := s.fence.removeOlder(); err != nil {
		s.o.Warn(err)
	}
	return nil
}

// Save writes a checkpoint. It first waits for the previous save, and returns its error if that failed. If one rank
// fails, all ranks return an error. After a RetryError the caller may continue and save again.
//
// An asynchronous Save returns at once. ctx also covers the writing, so it must last as long as the run.
func (s *Saver) Save(ctx context.Context, snap Snapshot) error {
	if err := s.Wait(); err != nil {
		return err
	}
	if !s.o.Async {
		return s.save(ctx, snap)
	}
	pending := make(chan error, 1)
	s.pending = pending
	go func() { pending <- s.save(ctx, snap) }() // Wait ends it
	return nil
}

// Wait waits for the background save and returns its error, once.
func (s *Saver) Wait() error {
	if s.pending == nil {
		return nil
	}
	err := <-s.pending
	s.pending = nil
	return err
}

// Ended reports whether no background save is running, so that Wait returns at once.
func (s *Saver) Ended() bool { return s.pending == nil || len(s.pending) > 0 }

// Leave waits like Wait, but at most for d, so that a hanging disk does not delay the report of a failed rank. If the
// save has not ended by then, it is lost; otherwise the saver is closed.
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

// Close waits for the save in the background and closes the directory.
func (s *Saver) Close() error {
	return errors.Join(s.Wait(), s.release())
}

// release closes the directory, once. If a write hangs, it leaves it to the end of the process: the write may continue
// and still use it.
func (s *Saver) release() error {
	if s.released || s.hung {
		return nil
	}
	s.released = true
	return s.dir.Close()
}

// tmpName returns the name of a step's directory before its commit.
func (s *Saver) tmpName(step int64) string { return dirName(step) + ".tmp-" + s.o.RunID }

// On each rank a save writes the rank's shard, reports it to rank 0, and receives the result from rank 0. A failed rank
// still takes part in all collectives, since the others wait in them.

// save writes the rank's shard, then makes a checkpoint of all shards.
func (s *Saver) save(ctx context.Context, snap Snapshot) error {
	failed, wrote, err := false, report{}, error(nil)
	if wrote, err = s.stage(ctx, snap); err != nil {
		err = fmt.Errorf("writing the shards: %w", err)
	} else if failed, err = s.gatherAndCommit(ctx, snap, wrote); err != nil && wrote.err != nil {
		err = wrote.err // regardless of the other ranks
	}
	if err != nil {
		err = fmt.Errorf("checkpoint of step %d: %w", snap.Meta.Step, err)
	}
	if s.failed = failed && !s.failed; s.failed {
		err = &RetryError{err}
	}
	return err
}

// stage writes the rank's shard. If the ranks do not finish together, it prefers this rank's own error.
func (s *Saver) stage(ctx context.Context, snap Snapshot) (report, error) {
	var done atomic.Pointer[report]
	err := s.onAllRanks(ctx, func() {
		r := s.writeShard(ctx, snap)
		done.Store(&r)
	})
	r := done.Load()
	if r == nil {
		return report{}, err
	}
	if err != nil && r.err != nil {
		err = r.err
	}
	return *r, err
}

// onAllRanks calls OnAllRanks, and records whether it left this rank's work behind.
func (s *Saver) onAllRanks(ctx context.Context, work func()) error {
	var ended atomic.Bool
	err := OnAllRanks(ctx, s.group, s.o.Beat, s.o.Limit, func() error {
		defer ended.Store(true)
		work()
		return nil
	})
	s.hung = s.hung || !ended.Load()
	return err
}

// gatherAndCommit gathers the reports of all ranks, and rank 0 commits the checkpoint. failed: every rank returns an
// error, all reached the end of the save, and no newer start exists.
func (s *Saver) gatherAndCommit(ctx context.Context, snap Snapshot, r report) (failed bool, err error) {
	blobs, err := s.group.gather(ctx, encode(r))
	if err != nil {
		return false, fmt.Errorf("gather of what the ranks wrote: %w", err)
	}
	var fs faults
	var result verdict
	err = s.onAllRanks(ctx, func() {
		if s.group.Rank() == 0 {
			fs = s.commit(ctx, snap, r, blobs)
			result.Final = errors.Is(fs.seenBy(0), ErrSuperseded)
			for _, f := range fs {
				result.Faults = append(result.Faults, faultText{f.Rank, f.Err.Error()})
			}
		}
	})
	if err != nil {
		return false, fmt.Errorf("waiting for rank 0 to complete it: %w", err)
	}
	blob, err := Broadcast(ctx, s.group, 0, encode(result))
	if err == nil && s.group.Rank() != 0 {
		err = json.Unmarshal(blob, &result)
		for _, f := range result.Faults {
			fs = append(fs, &RankError{f.Rank, errors.New(f.Error)})
		}
	}
	if fault := fs.seenBy(s.group.Rank()); fault != nil {
		return err == nil && !result.Final, fault
	}
	if err != nil {
		return false, fmt.Errorf("word from rank 0 that it is whole: %w", err)
	}
	return false, nil
}
