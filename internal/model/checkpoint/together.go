package checkpoint

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/cprun/cprun/comm"
)

const (
	defaultBeat  = 2 * time.Second
	defaultLimit = 2 * time.Hour // hundreds of gigabytes on a slow file system
)

// together does some work on every rank, and returns on each when all are done. Ranks that are
// still at it say so at every beat. So the group's deadline is for ranks that stand still, and
// disks may be slow.
func (s *Saver) together(ctx context.Context, work func()) error {
	return Together(ctx, s.group, s.o.Beat, s.o.Limit, func() error {
		work()
		return nil
	})
}

// Together does some work on every rank of a group, which may take up to limit, and returns when
// all are done. An error of the own work is returned at once: the caller tells the others. After
// any other error work may go on; it has to end with ctx. 0 means the defaults for a Saver.
func Together(ctx context.Context, c comm.Communicator, beat, limit time.Duration, work func() error) error {
	beat, limit = cmp.Or(beat, defaultBeat), cmp.Or(limit, defaultLimit)
	done := make(chan error, 1)
	go func() { done <- work() }() // ended by the end of work
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
