package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
)

// TrainOptions are the flags of `cprun train.yaml`.
type TrainOptions struct {
	Options
	Set    []string
	RunDir string   // "": runs/<name>-<time>
	Args   []string // the command line, the program first
	Resume string   // auto, never, or a path
	DryRun bool     // check the input and print the settings; start nothing

	job      string           // name of a job of several nodes; "": one node
	NoSave   bool             // write no checkpoint
	Scratch  bool             // the caller removes the run directory
	advanced func(step int64) // called after each step of rank 0; may be nil
}

// Train runs a training job and returns the exit status.
func Train(ctx context.Context, path string, o TrainOptions) (int, error) {
	signals := launch.CatchSignals() // no later request to stop is lost
	if o.NoSave {                    // else the program ends after this, and a later signal changes no status
		defer signals.Release()
	}
	out := o.Printer()
	if o.DryRun {
		return o.dry(ctx, path, out)
	}
	var r ready
	var several *multiNode
	asked, err := signals.Before(func() error {
		at, err := o.place()
		switch {
		case err != nil:
		case at.Several():
			several, err = o.multiNode(ctx, path, &at, out)
		default:
			var ranks int
			if ranks, err = o.resolve(); err == nil {
				r, err = o.check(ctx, path, ranks)
			}
		}
		return err
	})
	if asked != "" {
		out.Note(asked + ": stopped before training began; to resume, repeat the command")
		return launch.ExitStopped, nil
	}
	defer r.close()
	if err != nil {
		return 0, err
	}
	if several != nil {
		return several.train(signals)
	}
	return o.train(ctx, r, out, signals)
}

// A ready is a run with checked input and a locked directory.
type ready struct {
	cfg    *config.Config
	ranks  int
	choice chosen
	chosen *plan.Chosen // the strategy chosen by costs; nil: none
	docs   []int        // documents of the first sample, if the choice read them
	data   *plan.Data
	files  *data.Identity // of the data
	memory plan.Memory
	dir    string
	root   *os.Root // of dir: no symbolic link leads a write out of it
	lock   *os.File // on the checkpoints in dir
	from   *origin  // nil: the run starts from new weights

	generation int64 // number of the first start of the workers
}

func (r *ready) close() {
	r.lock.Close() // may be nil
	if r.root != nil {
		r.root.Close()
	}
}

// check prepares a run of that many ranks, on all nodes.
func (o *TrainOptions) check(ctx context.Context, path string, ranks int) (r ready, err error) {
	if r, err = o.checkInput(ctx, path, ranks); err != nil {
		return r, err
	}
	if r.root, err = o.runDir(path); err != nil {
		return r, err
	}
	r.dir = r.root.Name()
	checkpoints, err := files.Sub(r.root, checkpointsName)
	if err != nil {
		return r, inputf("--run-dir: %w, or name another --run-dir", err)
	}
	defer checkpoints.Close()
	if r.lock, err = checkpoint.Lock(checkpoints, o.job); err != nil {
		return r, inputf("--run-dir: %w; name another --run-dir", err)
	}
	if r.generation, err = checkpoint.NextGeneration(checkpoints); err != nil {
		return r, inputf("--run-dir: %w; name another --run-dir", err)
	}
	own, err := o.ownCheckpoint(ctx, checkpoints, &r)
	if own != nil {
		r.from = own
	}
	return r, err
}

// checkInput does the part of check that writes nothing.
func (o *TrainOptions) checkInput(ctx context.Context, path string, ranks int) (r ready, err error) {
	d, err := o.decider(o.machine)
	if err != nil {
		return r, err
	}
	cfg, err := config.Load(path, config.Options{Set: o.Set, Ranks: ranks, Hosts: o.machine.Hosts,
		Device: o.machine.Device(), Decide: d.Decide,
		Note: func(text string) { fmt.Fprintln(o.Stderr, terminal.Text(text)) }})
	if err != nil {
		return r, &InputError{err}
	}
	if p := cfg.Log.Prometheus; p != "" && o.job == "" { // of several nodes, rank 0 is perhaps on another
		if err := metrics.CheckPrometheus(p); err != nil {
			return r, &InputError{err}
		}
	}
	found, err := train.Check(cfg)
	if err != nil {
		return r, &InputError{err}
	}
	r.data = found
	if r.files, err = train.Identify(cfg, found); err != nil {
		return r, &InputError{err}
	}
	r.cfg, r.ranks, r.chosen, r.docs = cfg, ranks, d.Chosen, d.First()
	if r.choice, err = choose(cfg, o.machine); err != nil {
		return r, err
	}
	if err := checkAnswers(cfg); err != nil {
		return r, &InputError{err}
	}
	if r.memory, err = plan.Fit(cfg, ranks, o.machine, found); err == nil {
		err = r.memory.Check()
	}
	if err != nil {
		return r, &InputError{err}
	}
	// A run with checkpoints of its own resumes from them. The checkpoint of --resume may be gone by then.
	if own := o.RunDir != "" && len(steps(o.RunDir)) > 0; !own {
		r.from, err = o.namedCheckpoint(ctx, &r)
	}
	return r, err
}

// checkAnswers refuses log.samples with fused attention, which prepares slowly for each length of a text.
func checkAnswers(cfg *config.Config) error {
	if cfg.Log.Samples.Every == 0 || cfg.Parallel.Backend != backends.Fused.String() {
		return nil
	}
	return cfg.Fault("log.samples.every", errors.New("answers need attention.backend flash, and this run takes fused; "+
		"set it, or every to 0"))
}

func (o *TrainOptions) train(ctx context.Context, r ready, out *progress.Printer, signals *launch.Signals) (int,
	error) {
	b, err := o.begin(r, out)
	defer b.close()
	if err != nil {
		return 0, err
	}
	t := &tracker{out: out, start: time.Now(), root: r.root, measures: o.NoSave, advanced: o.advanced,
		again: o.again(r.dir), writes: o.writes(r.dir, r.cfg)}
	spec := launch.Job{
		RunID: launch.NewRunID(time.Now()), NProc: r.ranks, Argv: []string{"worker", string(job.RoleTrain)},
		Logs: b.logs, Payload: payload(b.task),
		Stderr: out, Show: o.show(), OnEvent: t.event, MaxRestarts: o.MaxRestarts, Signals: signals,
		Patient: UnderSlurm(),
	}
	var live *statusWriter
	if !o.Scratch {
		live = startStatus(&spec, 1)
	}
	res := launch.Run(ctx, spec)
	live.end(res)
	out.Close()
	b.merge(res)
	t.summary(res)
	return res.ExitCode, b.log.end(res)
}

// A begun is a run with a directory ready for its workers.
type begun struct {
	ready
	logs *os.Root
	log  *launcherLog
	task job.Train
}

func (o *TrainOptions) begin(r ready, out *progress.Printer) (b begun, err error) {
	b.ready = r
	if b.logs, err = files.Private(r.root, "logs"); err != nil {
		return b, inputf("run directory: %w", err)
	}
	if b.log, err = openLog(b.logs, "launcher.log", out, o); err != nil {
		return b, err
	}
	if r.from != nil && r.from.reseeded {
		r.docs = nil // another seed has another first sample
	}
	changes, err := prepare(&r, o.machine, o.costs(o.machine))
	if err != nil {
		return b, b.log.note(err)
	}
	debug.FreeOSMemory() // of the data, before the ranks need it
	b.task = job.Train{
		Config: string(r.cfg.YAML()), RunDir: r.dir, Version: o.Version, NoSave: o.NoSave, Machine: o.machine,
		Generation: r.generation, Data: r.files, HostData: r.memory.HostData,
	}
	if r.from != nil {
		b.task.From = r.from.dir
	}
	if !o.NoSave {
		changes = slices.Insert(changes, 0, "run directory "+terminal.Name(r.dir))
	}
	r.note(out, changes...)
	return b, nil
}

// note prints the warnings of a run, some lines, and notes on its data, its choices and its checkpoint.
func (r *ready) note(out *progress.Printer, lines ...string) {
	for _, w := range r.cfg.Warnings {
		out.Note("warning: " + w.String())
	}
	lines = slices.Concat(lines, dataLines(r.data, r.cfg), r.choice.notes)
	if text := r.memory.Waits(); text != "" {
		lines = append(lines, text)
	}
	if r.from != nil {
		lines = append(lines, r.from.notes...)
	}
	for _, line := range lines {
		out.Note(line)
	}
}

// merge merges the traces of a job. After a failed one it prints nothing: the last lines are about the failed rank.
func (b *begun) merge(res launch.Result) {
	if b.cfg.Log.TraceSteps == 0 {
		return
	}
	err := train.MergeTraces(b.root, b.ranks)
	switch {
	case err == nil:
	case res.ExitCode == launch.ExitFailed:
		b.log.note(err)
	default:
		b.log.out.Note(err.Error())
	}
}

func (b *begun) close() {
	if b.log != nil {
		b.log.close()
	}
	if b.logs != nil {
		b.logs.Close()
	}
}

func (o *TrainOptions) runDir(config string) (*os.Root, error) {
	if o.RunDir != "" {
		dir, err := filepath.Abs(o.RunDir)
		if err != nil {
			return nil, inputf("--run-dir: %w", err)
		}
		if !utf8.ValidString(dir) { // workers get it as JSON
			return nil, inputf("--run-dir: %s is not UTF-8; name another", terminal.Name(dir))
		}
		root, err := files.Make(dir)
		if err != nil {
			return nil, inputf("--run-dir: %w", err)
		}
		return root, nil
	}
	name := strings.TrimSuffix(filepath.Base(config), filepath.Ext(config))
	base, err := filepath.Abs(filepath.Join("runs", name+"-"+time.Now().Format("20060102-150405")))
	if err != nil {
		return nil, inputf("run directory: %w", err)
	}
	runs, err := files.Make(filepath.Dir(base))
	if err != nil {
		return nil, inputf("run directory: %w; name another with --run-dir", err)
	}
	runs.Close()
	// Two jobs started in the same second get different directories.
	for i := 1; ; i++ {
		dir := base
		if i > 1 {
			dir = fmt.Sprintf("%s-%d", base, i)
		}
		root, err := files.MakeNew(dir)
		if err == nil {
			return root, nil
		}
		if !errors.Is(err, os.ErrExist) {
			return nil, inputf("run directory: %w; name another with --run-dir", err)
		}
	}
}

// ownNow does what ownCheckpoint does, without creating or locking anything.
func (o *TrainOptions) ownNow(ctx context.Context, r *ready) (*origin, error) {
	if o.RunDir == "" {
		return nil, nil
	}
	run, err := filepath.Abs(o.RunDir)
	if err != nil {
		return nil, inputf("--run-dir: %w", err)
	}
	dir, err := files.OpenDir(checkpointsOf(run))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, inputf("--run-dir: %w; name another --run-dir", err)
	}
	defer dir.Close()
	return o.ownCheckpoint(ctx, dir, r)
}

// dry does the checks of a start, and prints the settings of the run.
func (o *TrainOptions) dry(ctx context.Context, path string, out *progress.Printer) (int, error) {
	at, err := o.place()
	if err != nil {
		return 0, err
	}
	perNode, err := o.resolve()
	if err != nil {
		return 0, err
	}
	o.machine.Hosts = hosts(&at, at.MaxAgents)
	r, err := o.checkInput(ctx, path, at.MaxAgents*cmp.Or(at.Workers, perNode))
	if err != nil {
		return 0, err
	}
	if own, err := o.ownNow(ctx, &r); err != nil {
		return 0, err
	} else if own != nil {
		r.from = own
	}
	r.note(out)
	begin := "random weights"
	if r.cfg.Model.From != "" {
		begin = "the weights of " + terminal.Name(r.cfg.Model.From)
	}
	if r.from != nil {
		begin = "the checkpoint " + terminal.Name(r.from.dir)
	}
	p := &r.cfg.Parallel
	out.Note(fmt.Sprintf("dry run ok: %s on %s (context %d x data %d)\n  algorithm %s, layout %s, "+
		"backend %s, from %s; details: cprun plan",
		readable.Counted(r.cfg.Train.Steps, "step"), readable.Counted(r.ranks, "rank"), p.Context, p.Data, p.Algorithm,
		p.Layout, p.Backend, begin))
	return 0, nil
}
