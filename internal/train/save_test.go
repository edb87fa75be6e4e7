package train_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/checkpoint"
	"github.com/cprun/cprun/internal/train"
)

// A checkpoint is reported once it is whole, also where it is written beside the training.
func TestSavedIsReportedOfWholeCheckpoints(t *testing.T) {
	for _, async := range []string{"true", "false"} {
		cfg := load(t, tiny(t), 2, "train.steps=7", "checkpoint.every=2", "checkpoint.keep=0", "checkpoint.async="+async)
		dir := t.TempDir()
		var saved []int64
		mustRun(t, cfg, 2, train.Options{RunDir: dir, Report: func(r train.Report) {
			if r.Kind != train.Saved {
				return
			}
			saved = append(saved, r.Step)
			c, reasons, err := checkpoint.Latest(t.Context(), filepath.Join(dir, "checkpoints"))
			if err != nil {
				t.Errorf("async %s: step %d is reported, and %v %v", async, r.Step, err, reasons)
				return
			}
			defer c.Close()
			if c.Manifest.Step < r.Step {
				t.Errorf("async %s: step %d is reported, and the newest whole checkpoint is of step %d", async, r.Step, c.Manifest.Step)
			}
		}})
		if want := []int64{2, 4, 6, 7}; !slices.Equal(saved, want) {
			t.Errorf("async %s: reported %v, want %v", async, saved, want)
		}
	}
}

// A run that begins where its config ends has nothing to train, and still leaves a checkpoint
// in its own directory; one that finds it there does not write it again.
func TestNothingLeftToTrain(t *testing.T) {
	cfg := load(t, tiny(t), 2)
	first := mustRun(t, cfg, 2, train.Options{})
	from := filepath.Join(first.dir, "checkpoints", "step-00000004")
	saves := 0
	count := func(r train.Report) {
		if r.Kind == train.Saved {
			saves++
		}
	}
	second := mustRun(t, cfg, 2, train.Options{From: from, Report: count})
	if len(second.steps) != 0 || saves != 1 {
		t.Errorf("a run that was done took %d steps and saved %d times", len(second.steps), saves)
	}
	if _, err := os.Stat(filepath.Join(second.dir, "checkpoints", "step-00000004", "manifest.json")); err != nil {
		t.Error(err)
	}
	mustRun(t, cfg, 2, train.Options{RunDir: second.dir, RunID: "again", Resume: true, Report: count})
	if saves != 1 {
		t.Errorf("the same run again saved %d times more", saves-1)
	}
}

// A run whose checkpoints are all damaged does not begin anew in their place.
func TestDamagedCheckpointsAreNotReplaced(t *testing.T) {
	cfg := load(t, tiny(t), 1, "checkpoint.every=2")
	first := mustRun(t, cfg, 1, train.Options{RunID: "a"})
	for _, step := range []string{"step-00000002", "step-00000004"} {
		if err := os.Truncate(filepath.Join(first.dir, "checkpoints", step, "manifest.json"), 10); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := runLocal(t, cfg, 1, train.Options{RunDir: first.dir, RunID: "b", Resume: true}); !errors.Is(err, checkpoint.ErrNoneWhole) {
		t.Errorf("going on from damaged checkpoints: %v, want ErrNoneWhole", err)
	}
}

// The steps of a trace are counted from where the run goes on.
func TestTraceStepsAreCountedFromTheStart(t *testing.T) {
	dir := t.TempDir()
	mustRun(t, load(t, tiny(t), 1, "train.steps=3"), 1, train.Options{RunDir: dir, RunID: "a"})
	run := t.TempDir()
	cfg := load(t, tiny(t), 1, "train.steps=9", "log.trace_steps=2")
	mustRun(t, cfg, 1, train.Options{RunDir: run, From: filepath.Join(dir, "checkpoints", "step-00000003")})
	text, err := os.ReadFile(filepath.Join(run, "logs", "trace-rank-0000.json"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), `"name":"sum of squares"`); n != 2 {
		t.Errorf("the trace of 2 steps has %d optimizer steps", n)
	}
}
