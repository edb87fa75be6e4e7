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

// save begins a checkpoint. If wait is set, it waits until the checkpoint is complete, and retries once at once.
func (r *run) save(ctx context.Context, wait bool) error {
	if r.opts.NoSave {
		return nil
	}
	r.opts.report(Report{Kind: Phase, Text: "checkpoint", Step: int64(r.step)})
	if err := r.tolerate(r.awaited(false), "this save tries again"); err != nil { // attempt reuses its memory
		return err
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
	if r.out != nil { // resuming needs the metrics of all steps before the checkpoint
		if err := r.out.Sync(); err != nil {
			unsynced = fmt.Errorf("metrics before the checkpoint of step %d: %w", r.step, err)
		}
	}
	copies := !wait && r.copies != nil
	snap, err := r.snapshot(ctx, &r.opts, copies)
	if err != nil {
		return err
	}
	snap.Err = unsynced
	if err := r.markBest(&snap); err != nil {
		return err
	}
	if err := checkFinite(ctx, snap); err != nil {
		return fmt.Errorf("checkpoint of step %d: %w", r.step, err)
	}
	if err := r.blamed(r.saver.Save(ctx, snap)); err != nil {
		return err
	}
	r.saving = saving{step: r.step, began: began, paused: time.Since(began)}
	if copies {
		return nil
	}
	return r.awaited(true) // the next step would overwrite the state
}

// nextTries ends the notice of a failed save.
const nextTries = "training continues, and the next save tries again; two failures in a row end the run"

// failedOnce reports whether a save failed on all ranks for the first time in a row.
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
	if !comm.IsRemote(err) { // remote errors name their rank
		err = fmt.Errorf("rank %d: %w", r.mesh.world.Rank(), err)
	}
	r.opts.notice(fmt.Sprintf("%v; %s", err, then))
}

// awaited waits for the save in progress, and reports success. If paused is set, training has paused since the start of
// the save.
func (r *run) awaited(paused bool) error {
	if err := r.blamed(r.saver.Wait()); err != nil {
		r.saving = saving{}
		return err
	}
	if paused {
		r.saving.paused = time.Since(r.saving.began)
	}
	r.saved()
	return nil
}

// poll collects the result of a finished background save.
func (r *run) poll() error {
	if r.saving.step == 0 || !r.saver.Ended() {
		return nil
	}
	return r.tolerate(r.awaited(false), nextTries)
}

// leave waits briefly for the background save of a failed run.
func (r *run) leave() error {
	ended, err := r.saver.Leave(leaveTime)
	if !ended {
		r.saving = saving{}
	}
	return err
}

// saved reports that the save in progress is complete.
func (r *run) saved() {
	if s := r.saving; s.step > 0 {
		if s.step == r.best.Step {
			r.kept = r.best
		}
		r.opts.report(Report{Kind: Saved, Step: int64(s.step), Took: time.Since(s.began), Paused: s.paused})
	}
	r.saving = saving{}
}

// blamed marks the error of a save as remote if another rank caused it.
func (r *run) blamed(err error) error {
	var fault *checkpoint.RankError
	if !errors.As(err, &fault) || fault.Rank == r.mesh.world.Rank() {
		return err
	}
	return &remote{err, &comm.PeerError{Rank: fault.Rank, Name: fmt.Sprintf("rank %d", fault.Rank), Op: "checkpoint",
		Cause: fault.Err}}
}

// remote adds the responsible rank to an error.
type remote struct {
	error
	peer *comm.PeerError
}

// Unwrap returns the error and its rank.
func (e *remote) Unwrap() []error { return []error{e.error, e.peer} }

// checkFinite returns an error if weights are not finite, so that their checkpoint does not replace a good one. A step
// with a finite gradient may spoil them.
func checkFinite(ctx context.Context, s checkpoint.Snapshot) error {
	const chunk = 1 << 22
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, f := range s.Fields {
		for data := range slices.Chunk(f.Data, chunk) {
			g.Go(func() error { return finite(f.Name, data) })
		}
	}
	if s.Read == nil {
		return g.Wait()
	}
	n, piece := int64(0), make([]float32, checkpoint.PieceSize)
	for _, r := range s.Ranges {
		n += r.Len()
	}
	for i, f := range s.Fields {
		for lo := int64(0); lo < n; lo += checkpoint.PieceSize {
			data := piece[:min(checkpoint.PieceSize, n-lo)]
			if err := s.Read(ctx, i, lo, data); err != nil {
				return err
			}
			if err := finite(f.Name, data); err != nil {
				return err
			}
		}
	}
	return nil
}

func finite(name string, data []float32) error {
	for _, x := range data {
		if x-x != 0 { // NaN or infinity
			return fmt.Errorf("%w: %s holds %v; no checkpoint of it is written. Lower optimizer.lr, or set "+
				"optimizer.grad_clip", errDiverged, name, x)
		}
	}
	return nil
}
