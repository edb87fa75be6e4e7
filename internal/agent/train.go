package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/checkpoint"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/train"
)

// TrainJob is what the workers of a training run are told.
type TrainJob struct {
	Config  string `json:"config"` // the resolved config in the run directory
	RunDir  string `json:"run_dir"`
	From    string `json:"from"` // the checkpoint to go on from; "": new weights
	Version string `json:"version"`
	// Machine is what the ranks run on, as the launcher has found it.
	Machine backend.Machine `json:"machine"`

	NoSave bool `json:"no_save,omitempty"` // write no checkpoint: the run is a measurement
}

// TrainOptions are the flags of `cprun train.yaml`.
type TrainOptions struct {
	Options
	Set    []string
	RunDir string // "": runs/<name>-<time>
	Resume string // auto, never, or a path

	noSave   bool             // write no checkpoint
	advanced func(step int64) // called when rank 0 has done a step; nil: nobody listens
}

// Train runs a training job and returns the exit status.
func Train(ctx context.Context, path string, o TrainOptions) (int, error) {
	signals := launch.CatchSignals() // from here on no request to stop is lost
	defer signals.Release()
	out := o.printer()
	var r ready
	asked, err := signals.Before(func() (err error) {
		r, err = o.check(ctx, path)
		return err
	})
	if asked != "" {
		out.Note(asked + ": stopped before training began; run the same command again")
		return launch.ExitStopped, nil
	}
	defer r.lock.Close() // nil, which is no harm, where it was not taken
	if err != nil {
		return 0, err
	}
	return o.train(ctx, r, out, signals)
}

// ready is a run whose input has been checked.
type ready struct {
	cfg    *config.Config
	ranks  int
	choice chosen
	dir    string
	lock   *os.File // of the checkpoints in dir
	from   *origin  // nil: it begins with new weights
}

// check finds every fault of the input, and makes and locks the run directory.
func (o *TrainOptions) check(ctx context.Context, path string) (r ready, err error) {
	ranks, device, err := o.resolve()
	if err != nil {
		return r, err
	}
	cfg, err := config.Load(path, config.Options{Set: o.Set, Ranks: ranks, Device: device})
	if err != nil {
		return r, &InputError{err}
	}
	if err := train.Check(cfg); err != nil {
		return r, &InputError{err}
	}
	r.cfg, r.ranks = cfg, ranks
	if r.choice, err = chooseBuilt(cfg, o.machine); err != nil {
		return r, err
	}
	if err := plan.Fit(cfg, ranks, o.machine); err != nil {
		return r, &InputError{err}
	}
	if err := plan.Room(cfg, ranks, o.machine); err != nil {
		return r, &InputError{err}
	}
	// A run goes on from its own checkpoints, and then needs no other, as a command that is given
	// again may name one that is gone by now.
	if own := o.RunDir != "" && len(steps(o.RunDir)) > 0; !own {
		if r.from, err = o.named(ctx, cfg); err != nil {
			return r, err
		}
	}
	if r.dir, err = o.runDir(path); err != nil {
		return r, err
	}
	if r.lock, err = checkpoint.Lock(checkpointsOf(r.dir)); err != nil {
		return r, inputf("--run-dir: %w; name another --run-dir", err)
	}
	own, err := o.own(ctx, r.dir, cfg)
	if own != nil {
		r.from = own
	}
	return r, err
}

// train runs what is ready, and returns the exit status.
func (o *TrainOptions) train(ctx context.Context, r ready, out *progress.Printer, signals *launch.Signals) (int, error) {
	cfg, ranks, dir, choice := r.cfg, r.ranks, r.dir, r.choice
	if err := prepare(dir, cfg, ranks, choice.Choice, o.machine); err != nil {
		return 0, err
	}
	job := TrainJob{Config: filepath.Join(dir, "config.yaml"), RunDir: dir, Version: o.Version, NoSave: o.noSave, Machine: o.machine}
	for _, w := range cfg.Warnings {
		out.Note("warning: " + w.String())
	}
	if !o.noSave {
		out.Note(fmt.Sprintf("run directory %s", dir))
	}
	for _, line := range choice.notes {
		out.Note(line)
	}
	if r.from != nil {
		job.From = r.from.dir
		for _, line := range r.from.notes {
			out.Note(line)
		}
	}
	t := &tracker{out: out, start: time.Now(), dir: dir, measures: o.noSave, advanced: o.advanced}
	res := launch.Run(ctx, launch.Job{
		NProc: ranks, Argv: []string{"worker", string(RoleTrain)}, LogDir: filepath.Join(dir, "logs"), Payload: payload(job),
		Stderr: out, Show: o.show(), OnEvent: t.event, MaxRestarts: o.MaxRestarts, Signals: signals,
	})
	out.Close()
	if cfg.Log.TraceSteps > 0 {
		if err := train.MergeTraces(dir, ranks); err != nil {
			out.Note("trace.json: " + err.Error())
		}
	}
	t.summary(res)
	return res.ExitCode, res.Err
}

// runDir makes the run directory.
func (o *TrainOptions) runDir(config string) (string, error) {
	if o.RunDir != "" {
		dir, err := filepath.Abs(o.RunDir)
		if err == nil {
			err = os.MkdirAll(dir, 0o777)
		}
		if err != nil {
			return "", inputf("--run-dir: %w", err)
		}
		return dir, nil
	}
	name := strings.TrimSuffix(filepath.Base(config), filepath.Ext(config))
	base, err := filepath.Abs(filepath.Join("runs", name+"-"+time.Now().Format("20060102-150405")))
	if err != nil {
		return "", inputf("run directory: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(base), 0o777); err != nil {
		return "", inputf("run directory: %w; name another with --run-dir", err)
	}
	// Two jobs of one second get directories of their own.
	for i := 1; ; i++ {
		dir := base
		if i > 1 {
			dir = fmt.Sprintf("%s-%d", base, i)
		}
		err := os.Mkdir(dir, 0o777)
		if err == nil {
			return dir, nil
		}
		if !errors.Is(err, os.ErrExist) {
			return "", inputf("run directory: %w; name another with --run-dir", err)
		}
	}
}

// prepare writes what a run directory holds before the first step.
func prepare(dir string, cfg *config.Config, ranks int, choice *backend.Choice, machine backend.Machine) error {
	p, err := plan.Make(cfg, ranks, planOptions(machine, choice, ranks))
	if err != nil {
		return &InputError{err}
	}
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	for name, data := range map[string][]byte{"config.yaml": cfg.YAML(), "plan.json": append(text, '\n')} {
		if err := replace(filepath.Join(dir, name), data); err != nil {
			return inputf("run directory: %w", err)
		}
	}
	return nil
}

// replace writes a file beside and renames it, so that a reader sees the old or the new one.
func replace(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, data, 0o666); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// tracker shows what the workers report.
type tracker struct {
	out   *progress.Printer
	start time.Time
	dir   string
	first *progress.Number // validation loss at the first and at the newest validation
	last  *progress.Number
	loss  progress.Number
	steps int64

	measures bool             // dir is removed afterwards
	advanced func(step int64) // or nil
}

// EventNotice is a line for the user, from a worker; EventValidation a validation loss
// before training.
const (
	EventNotice     = "notice"
	EventValidation = "validation"
)

func (t *tracker) event(rank int, e launch.Event) {
	if rank != 0 {
		return
	}
	switch e.Kind {
	case launch.EventProgress:
		if t.advanced != nil {
			t.advanced(e.Step)
		}
		var s progress.Step
		if len(e.Data) == 0 || json.Unmarshal(e.Data, &s) != nil {
			return // a step that was not logged; the launcher notes that it was reached
		}
		if s.ValLoss != nil {
			t.last = s.ValLoss
			if t.first == nil {
				t.first = s.ValLoss
			}
		}
		t.loss, t.steps = s.Loss, s.Step
		t.out.Step(s)
	case EventNotice:
		var text string
		if json.Unmarshal(e.Data, &text) == nil {
			t.out.Note(text)
		}
	case EventValidation:
		var n progress.Number
		if json.Unmarshal(e.Data, &n) == nil {
			t.first, t.last = &n, &n
		}
	}
}

// summary says how a run ended and what it wrote. Failures have been reported already.
func (t *tracker) summary(res launch.Result) {
	switch {
	case res.ExitCode == launch.ExitDone:
		line := fmt.Sprintf("done in %s", progress.Duration(time.Since(t.start)))
		if t.steps > 0 {
			line += fmt.Sprintf(": loss %.4f", float64(t.loss))
		}
		if t.first != nil && t.last != nil {
			line += fmt.Sprintf(", validation loss %.4f -> %.4f", float64(*t.first), float64(*t.last))
		}
		t.out.Note(line)
	case res.Stopped && t.measures:
		t.out.Note("stopped; a measurement writes no checkpoint")
	case res.Stopped:
		t.out.Note(fmt.Sprintf("stopped after a checkpoint; go on with the same command and --run-dir %s", t.dir))
	default:
		return
	}
	if t.measures {
		return
	}
	for _, f := range []struct{ label, name string }{
		{"metrics", "metrics.jsonl"}, {"checkpoint", "checkpoints/latest"}, {"logs", "logs"}, {"trace", "trace.json"},
	} {
		path := filepath.Join(t.dir, f.name)
		if f.label == "checkpoint" {
			name, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			path = filepath.Join(t.dir, "checkpoints", strings.TrimSpace(string(name)))
		}
		if _, err := os.Stat(path); err == nil {
			t.out.Note(fmt.Sprintf("  %-11s %s", f.label, path))
		}
	}
}
