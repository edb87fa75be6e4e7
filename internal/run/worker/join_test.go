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
