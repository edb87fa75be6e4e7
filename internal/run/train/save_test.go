package train_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/run/train"
)

// A checkpoint is reported after it is complete, also if it is written in the background.
func TestSavedIsReportedOfWholeCheckpoints(t *testing.T) {
	for _, set := range []string{"checkpoint.async=true", "checkpoint.async=false"} {
		cfg := load(t, tiny, 2, set, "train.steps=7", "checkpoint.every=2", "checkpoint.keep=0")
		dir := t.TempDir()
		var saved []int64
		mustRun(t, cfg, 2, train.Options{RunDir: dir, Report: func(r train.Report) {
			if r.Kind != train.Saved {
				return
			}
			saved = append(saved, r.Step)
			c, reasons, err := checkpoint.Latest(t.Context(), filepath.Join(dir, "checkpoints"))
			if err != nil {
				t.Errorf("%v: step %d is reported, and %v %v", set, r.Step, err, reasons)
				return
			}
			defer c.Close()
			if c.Manifest.Step < r.Step {
				t.Errorf("%v: step %d is reported, and the newest whole checkpoint is of step %d", set, r.Step,
					c.Manifest.Step)
			}
		}})
		if want := []int64{2, 4, 6, 7}; !slices.Equal(saved, want) {
			t.Errorf("%v: reported %v, want %v", set, saved, want)
		}
	}
}

// checkpoint.interval makes a checkpoint due on all ranks at once, and no save starts during another.
func TestCheckpointsByTime(t *testing.T) {
	for _, c := range []struct {
		set  []string
		want []int64 // steps
	}{
		{[]string{"checkpoint.interval=1ns", "checkpoint.async=false"}, []int64{1, 2, 3, 4, 5}},
		{[]string{"checkpoint.interval=1ns", "checkpoint.every=2", "checkpoint.async=false"}, []int64{1, 2, 3, 4, 5}},
		{[]string{"checkpoint.interval=1h"}, []int64{5}},
		{[]string{"checkpoint.interval=0", "checkpoint.every=3"}, []int64{3, 5}},
	} {
		cfg := load(t, tiny, 3, append(c.set, "train.steps=5", "checkpoint.keep=0")...)
		var saved []int64
		mustRun(t, cfg, 3, train.Options{Report: func(r train.Report) {
			if r.Kind == train.Saved {
				saved = append(saved, r.Step)
			}
		}})
		if !slices.Equal(saved, c.want) {
			t.Errorf("%v: checkpoints of steps %v, want %v", c.set, saved, c.want)
		}
	}
}

// Two checkpoints by time begin at least an interval apart. The last step always has one.
func TestCheckpointsByTimeAreApart(t *testing.T) {
	const interval, steps = time.Second, 9
	cfg := load(t, tiny, 2, "checkpoint.interval=1s", "checkpoint.async=false", "train.steps=9", "checkpoint.keep=0")
	var began []time.Time
	mustRun(t, cfg, 2, train.Options{Report: func(r train.Report) {
		switch {
		case r.Kind == train.Saved && r.Step < steps:
			began = append(began, time.Now().Add(-r.Took))
		case r.Kind == train.Advanced && r.Step == 2:
			time.Sleep(interval)
		}
	}})
	if len(began) == 0 {
		t.Error("an interval has passed, and no checkpoint was written")
	}
	for i := 1; i < len(began); i++ {
		// a little less, since the clock is read after the save
		if apart := began[i].Sub(began[i-1]); apart < interval/2 {
			t.Errorf("checkpoint %d begins %v after the one before it, want %v", i, apart, interval)
		}
	}
}

// A run without steps left still writes a checkpoint into its own directory. If it is there already, the run does not
// write it again.
func TestNothingLeftToTrain(t *testing.T) {
	cfg := load(t, tiny, 2)
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

// A run with only damaged checkpoints does not start over.
func TestDamagedCheckpointsAreNotReplaced(t *testing.T) {
	cfg := load(t, tiny, 1, "checkpoint.every=2")
	first := mustRun(t, cfg, 1, train.Options{RunID: "a"})
	for _, step := range []string{"step-00000002", "step-00000004"} {
		if err := os.Truncate(filepath.Join(first.dir, "checkpoints", step, "manifest.json"), 10); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := runLocal(t, cfg, 1, train.Options{RunDir: first.dir, RunID: "b", Resume: true}); !errors.Is(err,
		checkpoint.ErrNoneWhole) {
		t.Errorf("going on from damaged checkpoints: %v, want ErrNoneWhole", err)
	}
}

// A trace labels all work of a step, with the peers and bytes of every transfer and the peer of every wait.
func TestTraceTellsAStory(t *testing.T) {
	for _, shard := range []string{"optimizer", "parameters"} {
		t.Run(shard, func(t *testing.T) { traced(t, shard, nil) })
	}
	t.Run("hybrid", func(t *testing.T) {
		traced(t, "optimizer", hybrid, "delta rule", "states round 0", "states round 1", "halo", "halo gradients")
	})
}

// traced trains a model whose layers also have some parts beside hops.
func traced(t *testing.T, shard string, model []string, also ...string) {
	dir := t.TempDir()
	cfg := load(t, tiny, 3, append(model, "log.trace_steps=2", "memory.shard="+shard, "data.pack_documents=true",
		"parallel.layout=zigzag")...)
	mustRun(t, cfg, 3, train.Options{RunDir: dir})
	text, err := os.ReadFile(filepath.Join(dir, "logs", "trace-rank-0001.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		TraceEvents []struct {
			Ph, Name, Cat string
			Args          *struct{ Label, Detail string }
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	inLayer := "/(" + strings.Join(append(also, `hop \d owner \d`, "gradients home"), "|") + ")"
	labels := regexp.MustCompile(
		`^step [12](/(forward|backward)/(embedding|head|layer [0-2](` + inLayer + `)?)|/optimizer)?$|^weights$`)
	part := regexp.MustCompile(`layer \d` + inLayer + "$")
	peers := regexp.MustCompile(`^(\d+ bytes (to|from) rank [02](, )?)+$|^\d+ bytes over 3 ranks$`)
	exchanges, waits := 0, 0
	parts, lanes := map[string]bool{}, map[string]bool{}
	for _, e := range file.TraceEvents {
		switch {
		case e.Ph != "X":
			continue
		case e.Args == nil:
			parts[e.Name] = true
			continue
		case !labels.MatchString(e.Args.Label):
			t.Errorf("%s of %s is labelled %q", e.Name, e.Cat, e.Args.Label)
		}
		lanes[e.Name+" of "+e.Cat] = true
		if e.Name == "exchange" || e.Name == "all-reduce" {
			exchanges++
			if !peers.MatchString(e.Args.Detail) {
				t.Errorf("%s is told as %q", e.Name, e.Args.Detail)
			}
		}
		waited := e.Name == "wait" && strings.HasPrefix(e.Args.Detail, "exchange: ") &&
			strings.Contains(e.Args.Detail, "from rank")
		if waited {
			waits++
		}
		if (waited || strings.HasPrefix(e.Name, "delta ")) && !part.MatchString(e.Args.Label) {
			t.Errorf("%s, %q, is of no part of %q", e.Name, e.Args.Detail, e.Args.Label)
		}
	}
	if exchanges == 0 || waits == 0 {
		t.Errorf("%d transfers, %d waits for one", exchanges, waits)
	}
	of := map[string]string{"optimizer": "weights comm", "parameters": "gradients comm"}[shard]
	for _, lane := range []string{"all-gather of weights comm", "reduce-scatter of " + of} {
		if !lanes[lane] {
			t.Errorf("no %s among %v", lane, lanes)
		}
	}
	for _, part := range append(also, "step 1", "step 2", "forward", "backward", "optimizer", "embedding", "layer 1",
		"head") {
		if !parts[part] {
			t.Errorf("no slice %q around the work", part)
		}
	}
}

// trace_steps counts from the first step after a resume.
func TestTraceStepsAreCountedFromTheStart(t *testing.T) {
	dir := t.TempDir()
	mustRun(t, load(t, tiny, 1, "train.steps=3"), 1, train.Options{RunDir: dir, RunID: "a"})
	run := t.TempDir()
	cfg := load(t, tiny, 1, "train.steps=9", "log.trace_steps=2")
	mustRun(t, cfg, 1, train.Options{RunDir: run, From: filepath.Join(dir, "checkpoints", "step-00000003")})
	text, err := os.ReadFile(filepath.Join(run, "logs", "trace-rank-0000.json"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), `"name":"sum of squares"`); n != 2 {
		t.Errorf("the trace of 2 steps has %d optimizer steps", n)
	}
}
