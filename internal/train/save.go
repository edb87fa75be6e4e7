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
	"github.com/cprun/cprun/internal/checkpoint"
)

// save begins a checkpoint, and waits for it if asked to.
func (r *run) save(ctx context.Context, wait bool) error {
	if r.opts.NoSave {
		return nil
	}
	r.opts.report(Report{Kind: Phase, Text: "checkpoint", Step: int64(r.step)})
	began := time.Now()
	if err := r.awaited(false); err != nil { // what it writes is about to be overwritten
		return err // it names its step
	}
	if r.out != nil { // what a resumed run keeps of the metrics is on the disk before the checkpoint is
		if err := r.out.Sync(); err != nil {
			return fmt.Errorf("metrics before the checkpoint of step %d: %w", r.step, err)
		}
	}
	snap, err := r.snapshot(ctx, &r.opts)
	if err != nil {
		return err
	}
	if err := wholesome(snap); err != nil {
		return fmt.Errorf("checkpoint of step %d: %w", r.step, err)
	}
	if err := r.blamed(r.saver.Save(ctx, snap)); err != nil {
		return err
	}
	r.saving = saving{step: r.step, began: began, stood: time.Since(began)}
	r.savedAt = began
	if c := r.cfg.Checkpoint; !wait && (c.Async || c.Local != "") {
		return nil
	}
	return r.awaited(true)
}

// awaited waits for the save that was begun, and reports it if it has come to a good end. stands: training
// has stood still since the save began.
func (r *run) awaited(stands bool) error {
	if err := r.blamed(r.saver.Wait()); err != nil {
		r.saving = saving{} // it is reported by nobody
		return err
	}
	if stands {
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
	return r.awaited(false)
}

// leave waits for a while for the save in the background of a run that has failed.
func (r *run) leave() error {
	ended, err := r.saver.Leave(leaveTime)
	if !ended {
		r.saving = saving{} // nobody knows how it ends
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

// blamed marks an error of a save as another rank's where it is.
func (r *run) blamed(err error) error {
	var fault *checkpoint.RankError
	if !errors.As(err, &fault) || fault.Rank == r.mesh.world.Rank() {
		return err
	}
	return &remote{err, &comm.PeerError{Rank: fault.Rank, Name: fmt.Sprintf("rank %d", fault.Rank), Op: "checkpoint", Cause: fault.Err}}
}

// remote is an error in its own words that is another rank's.
type remote struct {
	error
	peer *comm.PeerError
}

// Unwrap returns the error and the rank that it is of.
func (e *remote) Unwrap() []error { return []error{e.error, e.peer} }

// wholesome is an error for weights that are not finite: a step may spoil them with a gradient
// that was finite, and a checkpoint of them would push out a good one.
func wholesome(s checkpoint.Snapshot) error {
	const piece = 1 << 22
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, f := range s.Fields {
		for data := range slices.Chunk(f.Data, piece) {
			g.Go(func() error {
				for _, x := range data {
					if x-x != 0 { // neither NaN nor an infinity equals itself less itself
						return fmt.Errorf("%w: %s holds %v; older checkpoints are left as they are: lower optimizer.lr, or set optimizer.grad_clip", errDiverged, f.Name, x)
					}
				}
				return nil
			})
		}
	}
	return g.Wait()
}
