package train

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/tensor"
)

// A traced is a stream that can record its work.
type traced interface {
	tensor.Stream
	Name() string
	// Trace sets a function to call after pieces of work, at the latest in Sync; nil turns it off.
	Trace(f func(tensor.Span))
}

// A lane is a stream with its unique name in a trace.
type lane struct {
	traced
	name string
}

func (r *run) lanes() []lane {
	var out []lane
	add := func(s tensor.Stream, of string) {
		if t, ok := s.(traced); ok {
			out = append(out, lane{t, strings.TrimSpace(of + " " + t.Name())})
		}
	}
	add(r.dev.Stream, "")
	for _, s := range r.dev.Copies {
		add(s, "")
	}
	groups := []comm.Communicator{r.mesh.context, r.mesh.weights, r.mesh.across, r.mesh.state}
	for i, of := range []string{"attention", "weights", "copies of weights", "gradients"} {
		if of == "gradients" && r.mesh.state == r.mesh.weights {
			break
		}
		if g, ok := groups[i].(comm.Streamer); ok {
			for _, s := range g.Streams() {
				add(s, of)
			}
		}
	}
	return out
}

// waitedFor returns the time that the compute stream has waited for transfers, if known.
func (r *run) waitedFor() (time.Duration, bool) {
	s, ok := r.dev.Stream.(tensor.WaitCounter)
	if !ok {
		return 0, false
	}
	return s.Waited(), true
}

// openTrace records the work of the streams in the first steps, if the config asks for it.
func (r *run) openTrace(ctx context.Context) error {
	if r.cfg.Log.TraceSteps == 0 {
		return nil
	}
	// a goroutine of the group may still queue transfers
	if err := r.flush(ctx); err != nil {
		return err
	}
	rank := r.mesh.world.Rank()
	t, err := metrics.CreateTrace(r.dirs.logs, traceName(rank), rank)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	r.trace = t
	for _, s := range r.lanes() {
		s.Trace(func(sp tensor.Span) {
			sp.Lane = s.name
			t.Span(sp)
		})
	}
	return nil
}

// traceName returns the name of a rank's trace in the logs of a run.
func traceName(rank int) string { return fmt.Sprintf("trace-rank-%04d.json", rank) }

// closeTrace ends the trace. If whole is set, its steps are finished and it waits for their work.
func (r *run) closeTrace(ctx context.Context, whole bool) error {
	if whole {
		_ = r.flush(ctx) // the loop reports errors
	}
	for _, s := range r.lanes() {
		if whole {
			_ = s.Sync(ctx) // so that all spans are recorded
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

// MergeTraces merges the traces of a run's ranks into trace.json.
func MergeTraces(run *os.Root, ranks int) error {
	var names []string
	for rank := range ranks {
		names = append(names, filepath.Join("logs", traceName(rank)))
	}
	return metrics.MergeTraces(run, "trace.json", names...)
}
