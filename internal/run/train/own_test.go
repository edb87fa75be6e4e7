package train

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cprun/cprun/comm"
)

// A rank whose save failed is the cause, even if it first gets the error from another rank.
func TestOwnFaultsAreNoVictims(t *testing.T) {
	told := fmt.Errorf("metrics of step 13: %w", &comm.PeerError{Rank: 1, Name: "rank 1",
		Cause: errors.New("rank 2: no space left on device")})
	own := errors.New("shard-00002-of-00003.safetensors: no space left on device")
	err := withOwn(told, []error{nil, own, comm.ErrAborted, told})
	if comm.IsRemote(err) || !errors.Is(err, own) || !strings.Contains(err.Error(), "metrics of step 13") {
		t.Errorf("with a fault of its own: %v", err)
	}
	if err := withOwn(told, []error{nil, comm.ErrAborted}); err != told {
		t.Errorf("without one: %v", err)
	}
	mine := errors.New("the loss is not a number")
	if err := withOwn(mine, []error{own}); !errors.Is(err, mine) || !errors.Is(err, own) {
		t.Errorf("two of its own: %v", err)
	}
}
