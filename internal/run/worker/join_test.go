package worker

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/launch"
)

// A rank that never gets the addresses of the others gives up at its limit. Its error names those ranks, and blames
// them.
func TestAddressesThatDoNotCome(t *testing.T) {
	p := &process{Worker: &launch.Worker{Process: launch.Process{Rank: 3, LocalRank: 1, LocalWorldSize: 2, WorldSize: 7}}}
	_, err := p.addresses(t.Context(), time.Millisecond)
	var peer *comm.PeerError
	if !errors.As(err, &peer) || !errors.Is(err, comm.ErrDeadline) || peer.Rank != 0 {
		t.Fatalf("%v", err)
	}
	for _, part := range []string{"ranks 0 to 1", "ranks 4 to 6", "1ms"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %q", part, err)
		}
	}
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	if _, err := p.addresses(ctx, time.Hour); !errors.Is(err, gone) {
		t.Errorf("%v, want what ended the wait", err)
	}
}

// A failure that the launcher reports before the ranks are connected ends the wait for them, and later the world.
func TestAFailureWhileRanksConnect(t *testing.T) {
	world := comm.NewLocal(2, nil, comm.Options{})
	p := &process{joined: make(chan struct{}), world: world[0]}
	reported := make(chan launch.Failed, 1)
	reported <- launch.Failed{Rank: 1, Reason: "its node is lost"}
	ctx := p.untilFailure(t.Context(), reported)
	<-ctx.Done()
	var peer *comm.PeerError
	if err := context.Cause(ctx); !errors.As(err, &peer) || peer.Rank != 1 || peer.Op != "connect" {
		t.Errorf("the wait for the ranks ends with %v", err)
	}
	close(p.joined)
	if err := world[1].Barrier(t.Context()); err == nil || !strings.Contains(err.Error(), "its node is lost") {
		t.Errorf("the world ends with %v", err)
	}
	for _, g := range world {
		g.Close()
	}
}
