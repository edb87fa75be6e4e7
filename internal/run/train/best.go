package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cprun/cprun/internal/model/checkpoint"
)

// best is a validation; Step 0 is none.
type best struct {
	Step int     `json:"step"`
	Loss float64 `json:"val_loss"`
}

// bestState names it in the checkpoint that checkpoint.best saves.
const bestState = "best"

func (r *run) savesBest() bool { return r.cfg.Checkpoint.Best && !r.opts.NoSave }

// isBest notes a validation with the lowest loss. All ranks must agree, so it waits for the save in progress, which may
// be the best.
func (r *run) isBest(loss float64) error {
	if !r.savesBest() {
		return nil
	}
	if err := r.tolerate(r.awaited(false), nextTries); err != nil {
		return err
	}
	if finite := loss-loss == 0; finite && (r.kept.Step == 0 || loss < r.kept.Loss) {
		r.best = best{r.step, loss}
	}
	return nil
}

// markBest marks the snapshot of the best step.
func (r *run) markBest(s *checkpoint.Snapshot) (err error) {
	if s.Best = r.best.Step > 0 && r.best.Step == r.step; s.Best {
		s.Meta.Extra[bestState], err = json.Marshal(r.best)
	}
	return err
}

// findBest reads the file best of the run's checkpoints on rank 0, so that all ranks go by the same.
func (r *run) findBest(ctx context.Context) (found best, err error) {
	text, err := r.fromRank0(ctx, r.readBest)
	if err == nil && len(text) > 0 {
		err = json.Unmarshal(text, &found)
	}
	return found, err
}

func (r *run) readBest(ctx context.Context) ([]byte, error) {
	c, err := checkpoint.Best(ctx, r.opts.checkpoints())
	switch {
	case errors.Is(err, checkpoint.ErrNone):
		return nil, nil
	case errors.Is(err, checkpoint.ErrNotWhole):
		r.opts.notice(fmt.Sprintf("checkpoints/best: %v; the next validation begins anew", err))
		return nil, nil
	case err != nil:
		return nil, err
	}
	defer c.Close()
	return c.Manifest.Extra[bestState], nil
}
