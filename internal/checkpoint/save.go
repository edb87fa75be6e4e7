package checkpoint

import (
	"context"
	"encoding/json"
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
	if err == nil {
		if err = s.conclude(ctx, snap, p); err != nil && p.err != nil {
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
	return err
}

// conclude gathers what the ranks have written, and has rank 0 commit it.
func (s *Saver) conclude(ctx context.Context, snap Snapshot, r report) error {
	blobs, err := s.group.Gather(ctx, r.encode())
	if err != nil {
		return fmt.Errorf("gather of what the ranks wrote: %w", err)
	}
	var result verdict
	commit := func() {
		if s.group.Rank() == 0 {
			result.Faults = s.commit(ctx, snap, r, blobs)
		}
	}
	if err := s.together(ctx, commit); err != nil {
		return fmt.Errorf("waiting for rank 0 to complete it: %w", err)
	}
	blob, err := s.group.Broadcast(ctx, result.encode())
	if err == nil && s.group.Rank() != 0 {
		err = json.Unmarshal(blob, &result)
	}
	if fault := result.Faults.seenBy(s.group.Rank()); fault != nil {
		return fault
	}
	if err != nil {
		return fmt.Errorf("word from rank 0 that it is whole: %w", err)
	}
	return nil
}
