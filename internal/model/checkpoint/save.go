package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
)

// A save is one rank's part of it: write the own shard, tell rank 0 of it, hear from rank 0 how it
// ended. A rank whose part went wrong takes part in all collectives all the same, since the others
// wait for it there.

// stage writes the own shard. After it the state itself is needed no more.
func (s *Saver) stage(ctx context.Context, snap Snapshot) (report, error) {
	wrote, err := s.reported(ctx, func() report { return s.writeShard(ctx, snap) })
	if err != nil {
		err = fmt.Errorf("writing the shards: %w", err)
	}
	return wrote, err
}

// reported does a part of the work on every rank at once. Where the ranks have not come to its end
// together, the error is the own one of this rank, if it has one.
func (s *Saver) reported(ctx context.Context, work func() report) (report, error) {
	var done atomic.Pointer[report]
	err := s.together(ctx, func() {
		r := work()
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

// finish makes a checkpoint of the shards of all ranks, unless staging has failed.
func (s *Saver) finish(ctx context.Context, snap Snapshot, p report, err error) error {
	if err == nil && s.local != nil {
		p, err = s.reported(ctx, func() report { return s.upload(ctx, p) })
		if err != nil {
			err = fmt.Errorf("copying the shards from the nodes to the run directory: %w", err)
		}
	}
	failed := false
	if err == nil {
		if failed, err = s.conclude(ctx, snap, p); err != nil && p.err != nil {
			err = p.err // however the others end the save
		}
	}
	if s.local != nil {
		if bad := s.local.forget(); bad != nil && s.group.Rank() == 0 {
			s.o.Warn(fmt.Errorf("checkpoint.local: %w", bad))
		}
	}
	if err != nil {
		err = fmt.Errorf("checkpoint of step %d: %w", snap.Meta.Step, err)
	}
	if s.failed = failed && !s.failed; s.failed {
		err = &RetryError{err}
	}
	return err
}

// conclude gathers the reports of all ranks, and has rank 0 commit the checkpoint. failed: every rank
// returns an error, all of them reached the end of the save, and no newer start has begun.
func (s *Saver) conclude(ctx context.Context, snap Snapshot, r report) (failed bool, err error) {
	blobs, err := s.group.gather(ctx, encode(r))
	if err != nil {
		return false, fmt.Errorf("gather of what the ranks wrote: %w", err)
	}
	var result verdict
	commit := func() {
		if s.group.Rank() == 0 {
			result.Faults = s.commit(ctx, snap, r, blobs)
			result.Final = errors.Is(result.Faults.seenBy(0), ErrSuperseded)
		}
	}
	if err := s.together(ctx, commit); err != nil {
		return false, fmt.Errorf("waiting for rank 0 to complete it: %w", err)
	}
	blob, err := Broadcast(ctx, s.group, encode(result))
	if err == nil && s.group.Rank() != 0 {
		err = json.Unmarshal(blob, &result)
	}
	if fault := result.Faults.seenBy(s.group.Rank()); fault != nil {
		return err == nil && !result.Final, fault
	}
	if err != nil {
		return false, fmt.Errorf("word from rank 0 that it is whole: %w", err)
	}
	return false, nil
}
