package copyengine

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
)

// kinds lists the ways to join ranks of several processes by engines.
var kinds = worldtest.ProcessKinds{"copy": {Open: ringOf(fakeProcess)}}

// ringOf makes ranks pass messages around a ring for ever.
func ringOf(
	connect func(ctx context.Context, host *comm.Group, dir string) (*Rank, error),
) func(context.Context, *comm.Group, string) (worldtest.ProcessRank, error) {
	return func(ctx context.Context, host *comm.Group, dir string) (worldtest.ProcessRank, error) {
		r, err := connect(ctx, host, dir)
		if err != nil {
			return worldtest.ProcessRank{}, err
		}
		step := func(ctx context.Context) error {
			err := r.Ring(ctx, 20, 100_000)
			if err != nil {
				r.Close() // the streams end
			}
			return err
		}
		return worldtest.ProcessRank{Comm: host, Step: step}, nil
	}
}

func TestMain(m *testing.M) {
	kinds.Main()
	goleak.VerifyTestMain(m)
}

// TestKill kills one of four processes. The others must report it by name.
func TestKill(t *testing.T) {
	for kind := range kinds {
		t.Run(kind, func(t *testing.T) { kinds.End(t, kind, "ring", 4, worldtest.Kill, comm.ErrPeerLost.Error()) })
	}
}
