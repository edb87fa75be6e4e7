package train

import (
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/checkpoint"
)

func TestDeadlineOf(t *testing.T) {
	for longest, want := range map[time.Duration]time.Duration{
		0: 2 * time.Minute, 100 * time.Millisecond: 2 * time.Minute, 9 * time.Second: 3 * time.Minute,
		20 * time.Second: 5 * time.Minute, 2 * time.Minute: 10 * time.Minute,
	} {
		if got := deadlineOf(longest); got != want {
			t.Errorf("steps of %v: %v, want %v", longest, got, want)
		}
	}
}

// With parallel.deadline: auto, the deadline of all groups on all ranks follows the step time.
func TestTheDeadlineFollowsTheSteps(t *testing.T) {
	const ranks = 2
	for set, want := range map[string]time.Duration{"parallel.deadline=auto": 2 * time.Minute,
		"parallel.deadline=40s": 40 * time.Second} {
		jobs := make([]*run, ranks)
		runRanks(t, ranks, []string{"train.steps=6", set}, Options{RunDir: t.TempDir(), RunID: "a"},
			func(rank int, r *run) { jobs[rank] = r })
		for rank, r := range jobs {
			for i, g := range []comm.Communicator{r.mesh.world, r.mesh.state, r.mesh.context, r.mesh.saves} {
				if got := g.(*comm.Group).Options().Deadline; got != want {
					t.Errorf("%s: rank %d, group %d: deadline %v, want %v", set, rank, i, got, want)
				}
			}
		}
	}
}

// The other ranks wait for a rank with a slow disk as long as it sends heartbeats. The deadline is for hung ranks.
func TestSlowDisksAreWaitedFor(t *testing.T) {
	const deadline = 100 * time.Millisecond
	for name, c := range map[string]struct {
		beat time.Duration
		want error
	}{"with beats": {deadline / 10, nil}, "without": {time.Hour, comm.ErrDeadline}} {
		world := comm.NewLocal(3, nil, comm.Options{Deadline: deadline})
		var g errgroup.Group
		for r := range world {
			g.Go(func() error {
				return checkpoint.OnAllRanks(context.Background(), world[r], c.beat, 0, func() error {
					if r == 1 {
						time.Sleep(10*deadline + 2*time.Second) // including the second check of a stopped rank
					}
					return nil
				})
			})
		}
		if err := g.Wait(); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		for _, w := range world {
			w.Close()
		}
	}
}
