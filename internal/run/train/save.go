package train

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/checkpoint"
)

// save begins a checkpoint. If wait is set, it returns after the checkpoint is complete, and makes a second
// attempt at once: no later save would.
func (r *run) save(ctx context.Context, wait bool) error {
	if r.opts.NoSave {
		return nil
	}
	r.opts.report(Report{Kind: Phase, Text: "checkpoint", Step: int64(r.step)})
	if err := r.tolerate(r.awaited(false), "this save tries again"); err != nil { // attempt overwrites its memory
		return err // it names its step
	}
	if !wait {
		return r.tolerate(r.attempt(ctx, false), nextTries)
	}
	err := r.attempt(ctx, true)
	if failedOnce(err) {
		r.noticeFailure(err, "trying once more")
		err = r.attempt(ctx, true)
	}
	return err
}

// attempt saves the state of this step, in the background unless wait is set.
func (r *run) attempt(ctx context.Context, wait bool) error {
	began := time.Now()
	r.savedAt = began
	var unsynced error
	if r.out != nil { // a resumed run needs the metrics of all steps before its checkpoint
		if err := r.out.Sync(); err != nil {
			unsynced = fmt.Errorf("metrics before the checkpoint of step %d: %w", r.step, err)
		}
	}
	snap, err := r.snapshot(ctx, &r.opts)
	if err != nil {
		return err
	}
	snap.Err = unsynced
	if err := wholesome(snap); err != nil {
		return fmt.Errorf("checkpoint of step %d: %w", r.step, err)
	}
	if err := r.blamed(r.saver.Save(ctx, snap)); err != nil {
		return err
	}
	r.saving = saving{step: r.step, began: began, stood: time.Since(began)}
	if c := r.cfg.Checkpoint; !wait && (c.Async || c.Local != "") {
		return nil
	}
	return r.awaited(true)
}

// nextTries follows the notice of a failed save.
const nextTries = "the run goes on, and the next save tries again; two failures in a row end the run"

// failedOnce reports whether a save failed on all ranks, and the one before it did not.
func failedOnce(err error) bool {
	var again *checkpoint.RetryError
	return errors.As(err, &again)
}

// tolerate reports the first failure in a row of a save, and returns any other error.
func (r *run) tolerate(err error, then string) error {
	if !failedOnce(err) {
		return err
	}
	r.noticeFailure(err, then)
	return nil
}

// noticeFailure reports a failed save, with its rank.
func (r *run) noticeFailure(err error, then string) {
	if !comm.IsRemote(err) { // else it names the other rank
		err = fmt.Errorf("rank %d: %w", r.mesh.world.Rank(), err)
	}
	r.opts.notice(fmt.Sprintf("%v; %s", err, then))
}

// awaited waits for the save under way, and reports success. paused: training has paused since the save
// began.
func (r *run) awaited(paused bool) error {
	if err := r.blamed(r.saver.Wait()); err != nil {
		r.saving = saving{}
		return err
	}
	if paused {
		r.saving.stood = time.Since(r.saving.began)
	}
	r.whole()
	return nil
}

// poll sees how the save in the background has ended, if it has.
func (r *run) poll() error {
	if r.saving.step == 0 || !r.saver.Ended() {
		return nil
	}
	return r.tolerate(r.awaited(false), nextTries)
}

// leave waits for a while for the save in the background of a run that has failed.
func (r *run) leave() error {
	ended, err := r.saver.Leave(leaveTime)
	if !ended {
		r.saving = saving{}
	}
	return err
}

// whole reports that the save that was begun has come to a good end.
func (r *run) whole() {
	if s := r.saving; s.step > 0 {
		r.opts.report(Report{Kind: Saved, Step: int64(s.step), Took: time.Since(s.began), Stood: s.stood})
	}
	r.saving = saving{}
}

// blamed marks an error of a save as remote if another rank caused it.
func (r *run) blamed(err error) error {
	var fault *checkpoint.RankError
	if !errors.As(err, &fault) || fault.Rank == r.mesh.world.Rank() {
		return err
	}
	return &remote{err, &comm.PeerError{Rank: fault.Rank, Name: fmt.Sprintf("rank %d", fault.Rank), Op: "checkpoint",
		Cause: fault.Err}}
}

// remote adds the rank that caused an error to its text.
type remote struct {
	error
	peer *comm.PeerError
}

// Unwrap returns the error and its rank.
func (e *remote) Unwrap() []error { return []error{e.error, e.peer} }

// wholesome returns an error if weights are not finite: a step may spoil them with a finite
// gradient, and their checkpoint would replace a good one.
func wholesome(s checkpoint.Snapshot) error {
	const piece = 1 << 22
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, f := range s.Fields {
		for data := range slices.Chunk(f.Data, piece) {
			g.Go(func() error {
				for _, x := range data {
					if x-x != 0 { // neither NaN nor an infinity equals itself less itself
						return fmt.Errorf("%w: %s holds %v; older checkpoints are left as they are: lower optimizer.lr, or "+
							"set optimizer.grad_clip", errDiverged, f.Name, x)
					}
				}
				return nil
			})
		}
	}
	return g.Wait()
}
