package copyengine

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
)

// TestNoGates checks that a call has no gates if a copy may need the processors that wait for it, and that Gates
// returns after the group has failed. TestCopyEngineCases uses gates.
func TestNoGates(t *testing.T) {
	ctx := testContext(t)
	boom := errors.New("the loss is not a number")
	eachRank(t, fakeRanks(t, 2, nil, 0, comm.Options{}), func(r *Rank) error {
		v, err := r.rig.bytes(100)
		if err != nil {
			return err
		}
		peer := 1 - r.Rank()
		r.e.near[peer] = true
		p, err := r.Exchange(
			[]comm.Message{{Peer: peer, View: v.Slice(3, 0, 50)}},
			[]comm.Message{{Peer: peer, View: v.Slice(3, 50, 100)}},
		)
		if err != nil {
			return err
		}
		if gates := p.(comm.Gated).Gates(); gates != nil {
			return fmt.Errorf("a device that both ranks have: %v", gates)
		}
		p.Wait()
		if err := p.Sync(ctx); err != nil {
			return err
		}
		r.e.near[peer] = false
		if r.Rank() == 1 {
			time.Sleep(5 * time.Millisecond)
			r.Abort(boom)
			return nil
		}
		if p, err = r.Exchange(nil, []comm.Message{{Peer: 1, View: v}}); err != nil {
			return nil // the other one was quick
		}
		if gates := p.(comm.Gated).Gates(); gates != nil {
			return fmt.Errorf("a group that has failed: %v", gates)
		}
		if err := p.Sync(ctx); !errors.Is(err, comm.ErrAborted) {
			return fmt.Errorf("the call ended with %w", err)
		}
		return nil
	})
}
