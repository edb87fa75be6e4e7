package comm_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// TestDeadlineOfLateRank lets rank 1 of a ring stay away and rank 3 come late: within the deadline of rank 4, or during
// its second look. When rank 4 gives up, rank 3 also waits, with most of its deadline ahead. It must have announced its
// wait, so that all ranks blame rank 1.
func TestDeadlineOfLateRank(t *testing.T) {
	const silent, tardy, n = 1, 3, 9
	opts := comm.Options{Deadline: 1500 * time.Millisecond}
	local := func(t testing.TB, pairs int, compute []tensor.Stream, opts comm.Options) []*comm.Group {
		return comm.NewLocalFew(len(compute), pairs, compute, opts)
	}
	for name, w := range map[string]world{"local": local, "unix": unixWorld} {
		for call, late := range map[string]time.Duration{"ring": 1100 * time.Millisecond, "barrier": 2 * time.Second} {
			t.Run(name+" "+call, func(t *testing.T) {
				t.Parallel()
				groups := w(t, 1, make([]tensor.Stream, n), opts)
				defer closeAll(groups)
				everyone(t, groups, func(g *comm.Group) error { return g.Barrier(t.Context()) })
				everyone(t, groups, func(g *comm.Group) error {
					switch g.Rank() {
					case silent:
						return nil
					case tardy:
						time.Sleep(late)
					}
					err := waitIn(t.Context(), g, call)
					var pe *comm.PeerError
					if !errors.As(err, &pe) || pe.Rank != silent || !errors.Is(err, comm.ErrDeadline) {
						t.Errorf("rank %d: %v, want rank %d and the deadline", g.Rank(), err, silent)
					}
					return nil
				})
			})
		}
	}
}

// waitIn blocks in a call.
func waitIn(ctx context.Context, g *comm.Group, call string) error {
	if call == "barrier" {
		return g.Barrier(ctx)
	}
	v := tensor.New(tensor.F32, 10)
	p, err := g.Exchange(nil, []comm.Message{{Peer: (g.Rank() + g.Size() - 1) % g.Size(), View: v}})
	if err != nil {
		return err
	}
	return p.Sync(ctx)
}
