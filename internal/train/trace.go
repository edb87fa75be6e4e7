package train

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/metrics"
	"github.com/cprun/cprun/internal/tensor"
)

// traced is a stream whose work can be watched.
type traced interface {
	tensor.Stream
	// Trace has f called after pieces of work, at the latest in Sync; nil turns it off.
	Trace(f func(tensor.Span))
}

// streams are the lanes of a trace.
func (r *run) streams() []traced {
	var out []traced
	add := func(s tensor.Stream) {
		if t, ok := s.(traced); ok {
			out = append(out, t)
		}
	}
	add(r.dev.Stream)
	for _, c := range []comm.Communicator{r.mesh.state, r.mesh.context} {
		for _, s := range lanes(c) {
			add(s)
		}
	}
	return out
}

// countWaits has the compute stream tell how long it waits, where it does so only when asked.
func (r *run) countWaits() {
	if s, ok := r.dev.Stream.(interface{ CountWaits() }); ok {
		s.CountWaits()
	}
}

// waitedFor is the time that the compute stream has waited for transfers, where it tells.
func (r *run) waitedFor() (time.Duration, bool) {
	s, ok := r.dev.Stream.(interface{ Waited() time.Duration })
	if !ok {
		return 0, false
	}
	return s.Waited(), true
}

// openTrace records what the streams do in the first steps, where the config asks for it.
func (r *run) openTrace(ctx context.Context) error {
	if r.cfg.Log.TraceSteps == 0 {
		return nil
	}
	// Transfers that wait for their turn are queued by a goroutine of the group's.
	if err := r.settle(ctx); err != nil {
		return err
	}
	rank := r.mesh.world.Rank()
	t, err := metrics.CreateTrace(tracePath(r.opts.RunDir, rank), rank)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	r.trace = t
	for _, s := range r.streams() {
		s.Trace(t.Span)
	}
	return nil
}

func tracePath(runDir string, rank int) string {
	return filepath.Join(runDir, "logs", fmt.Sprintf("trace-rank-%04d.json", rank))
}

// closeTrace ends the trace. whole: its steps are finished, so that what they queued can be
// waited for.
func (r *run) closeTrace(ctx context.Context, whole bool) error {
	if whole {
		_ = r.settle(ctx) // how it ended is known to the loop
	}
	for _, s := range r.streams() {
		if whole {
			_ = s.Sync(ctx) // so that all is told
		}
		s.Trace(nil)
	}
	t := r.trace
	r.trace = nil
	if err := t.Close(); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// MergeTraces makes trace.json of the traces that the ranks of a run have left.
func MergeTraces(runDir string, ranks int) error {
	var paths []string
	for rank := range ranks {
		paths = append(paths, tracePath(runDir, rank))
	}
	return metrics.MergeTraces(filepath.Join(runDir, "trace.json"), paths...)
}
