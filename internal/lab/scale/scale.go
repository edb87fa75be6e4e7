// Package scale implements `cprun scale`. It plans the cells of an experiment, runs each one as a process, or submits
// them to Slurm, and writes the results. Package experiment has the experiment, its directory and its results.
package scale

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/lab/report"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/train"
)

// Options are the flags of `cprun scale`.
type Options struct {
	command.Options
	Set      []string // overrides of the experiment's set
	Out      string   // directory; "": runs/<name>-<time>, or the newest unfinished one
	Resume   string   // auto or never
	PlanOnly bool
	Assume   []string // with PlanOnly: properties of the machine
	Slurm    bool
	Sbatch   []string // with Slurm: arguments for sbatch
	Args     []string // the command line, the program first

	Share  int  // in an array task: its share of the cells, from 1; 0: all cells
	Gather bool // only write the results of finished runs
}

type scale struct {
	*Options
	e       *experiment.Experiment
	id      experiment.Identity
	results *experiment.Results
	cells   []*cell // of the results, without skipped ones
	store   *experiment.Store
	out     *progress.Printer
	share   map[string]bool         // the cells of this array task; nil: all
	sites   map[string]command.Site // by --device
}

// A cell is a cell of the results with the work of its runs.
type cell struct {
	*experiment.Cell
	config        []byte // train.yaml, autos unresolved; nil if it has faults
	nproc, nnodes int
	device        string // value of --device
	steps         int
	plan          experiment.Plan
	why           error // the reason not to run it; nil: it can run
}

// Run runs, plans or submits an experiment, and returns the exit status.
func Run(path string, o Options) (int, error) {
	signals := launch.CatchSignals()
	defer signals.Release()
	s := &scale{Options: &o, sites: map[string]command.Site{}}
	asked, err := signals.Before(func() error { return s.check(path) })
	if asked != "" {
		fmt.Fprintf(o.Stderr, "cprun: %s: stopped before the first cell; to resume, repeat the command\n", asked)
		return launch.ExitStopped, nil
	}
	if err != nil {
		return 0, err
	}
	if o.PlanOnly {
		return s.planOnly()
	}
	r := s.results
	s.store, err = experiment.Open(o.Out, experiment.Header{
		Version: r.Version, Identity: s.id, Created: r.Created, Command: r.Command, Commit: r.Commit,
		Machine: r.Machine, Device: r.Device,
	}, o.Resume == "never", o.Share)
	if err != nil {
		return 0, &command.InputError{Err: err}
	}
	defer s.store.Close()
	h := &s.store.Header // of the first start
	r.Command, r.Commit, r.Created, r.Machine, r.Device = h.Command, h.Commit, h.Created, h.Machine, h.Device
	s.settle(s.store.Runs)
	switch {
	case o.Slurm:
		return s.submit()
	case o.Gather:
		return s.finish()
	}
	return s.run(signals)
}

func inputf(format string, args ...any) error {
	return &command.InputError{Err: fmt.Errorf(format, args...)}
}

// check reports every fault of the input and plans each pending cell. It writes nothing.
func (s *scale) check(path string) (err error) {
	switch {
	case s.Resume != "auto" && s.Resume != "never":
		return inputf("--resume %q: want auto or never", s.Resume)
	case len(s.Assume) > 0 && !s.PlanOnly:
		return inputf("--assume needs --plan: runs use this machine")
	case len(s.Sbatch) > 0 && !s.Slurm:
		return inputf("--sbatch needs --slurm: it has the arguments of the jobs")
	case s.Slurm && s.PlanOnly:
		return inputf("--slurm with --plan: a plan needs no job; drop one of the two")
	}
	if s.e, err = experiment.Load(path); err == nil {
		err = s.configs()
	}
	if err != nil {
		return &command.InputError{Err: err}
	}
	if err := s.directory(); err != nil {
		return err
	}
	if s.Resume == "auto" && !s.PlanOnly {
		runs, _ := experiment.Peek(s.Out, s.id)
		s.settle(runs)
	}
	if s.Slurm || s.Gather { // the cells run on other machines
		s.results.Device, s.results.Machine = s.Device, "several nodes of a Slurm cluster"
		if job := s.queued(); s.Slurm && job != "" {
			return inputf("--slurm: job %s still runs the cells; wait for it, or end it with "+"scancel %s", job, job)
		}
		return nil
	}
	alone := s.Options.Options
	alone.Quiet = alone.Quiet || s.Share > 0 // a task has more nodes for cells of several nodes
	if err := alone.OneNode(); err != nil {
		return err
	}
	if s.Share > 0 {
		if err := s.deal(); err != nil {
			return err
		}
	}
	return s.plans()
}

// configs begins the results, loads the configs of all cells, and checks them without a machine.
func (s *scale) configs() error {
	s.results = &experiment.Results{
		Version: experiment.Version, Name: s.e.Name, Command: command.Shell(s.Args), Commit: s.Version,
		Created: time.Now().UTC().Truncate(time.Second), Base: s.e.Base, Grid: s.e.Grid, Set: maps.Clone(s.e.Set),
		Cells: s.e.Cells(),
	}
	for _, flag := range s.Set {
		key, value, _ := strings.Cut(flag, "=")
		key = strings.TrimSpace(key)
		if slices.ContainsFunc(s.e.Grid, func(a experiment.Axis) bool { return a.Key == key }) {
			return fmt.Errorf("--set %s: the grid also sets this key; remove one of the two", terminal.Name(flag))
		}
		s.results.Set[key] = value
	}
	var texts [][]byte
	var faults []error
	for i := range s.results.Cells {
		c := &cell{Cell: &s.results.Cells[i]}
		if c.Status == experiment.Skipped {
			continue
		}
		cfg, err := config.Load(s.e.BasePath, config.Options{Set: s.e.Flags(c.Cell, s.Set),
			NoFiles: s.PlanOnly || s.Slurm || s.Gather})
		if err == nil && cfg.Train.Epochs > 0 {
			_, err = train.Check(cfg)
		}
		if err != nil {
			c.why, faults = s.e.Place(err), append(faults, err)
		} else if c.config, c.steps = cfg.YAML(), cfg.Train.Steps; c.steps <= s.e.Warmup {
			return s.e.Faultf("warmup", "%d warmup steps leave none to count, since train.steps is %d; lower "+
				"warmup or raise train.steps", s.e.Warmup, c.steps)
		}
		s.cells, texts = append(s.cells, c), append(texts, c.config)
	}
	switch {
	case len(s.cells) == 0:
		return s.e.Faultf("skip", "it skips every cell")
	case len(faults) == len(s.cells):
		return s.e.Refuse(faults...)
	}
	s.id = s.e.Identity(texts, map[string]string{"--nproc": s.NProc, "--device": s.Device})
	return nil
}

// directory makes Out an absolute path: the given one, the newest unfinished one, or a new one.
func (s *scale) directory() error {
	if s.Out == "" {
		name := s.e.Name
		if s.PlanOnly {
			name += "-plan"
		}
		before, _ := filepath.Glob(filepath.Join("runs", name+"-*")) // a name with pattern characters finds none
		if s.Resume == "auto" && !s.PlanOnly {
			s.Out = experiment.Unfinished(before, s.id, s.done)
		}
		for i := 1; s.Out == ""; i++ {
			dir := filepath.Join("runs", name+"-"+time.Now().Format("20060102-150405"))
			if i > 1 {
				dir += fmt.Sprintf("-%d", i)
			}
			if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
				s.Out = dir
			}
		}
	}
	abs, err := filepath.Abs(s.Out)
	if err != nil {
		return inputf("--out: %w", err)
	}
	s.Out = abs
	if _, err := os.Stat(filepath.Join(abs, "cells.jsonl")); s.PlanOnly && err == nil {
		return inputf("--out: %s has results of runs, which a plan would overwrite; name another directory",
			terminal.Name(abs))
	}
	return nil
}

func (s *scale) done(runs []experiment.Run) bool {
	cells := slices.Clone(s.results.Cells)
	experiment.Settle(cells, runs, s.e.Repeat)
	return !slices.ContainsFunc(cells, func(c experiment.Cell) bool { return !c.Done() })
}

func (s *scale) settle(runs []experiment.Run) { experiment.Settle(s.results.Cells, runs, s.e.Repeat) }

// write writes the results, with the page at the end of the command.
func (s *scale) write(root *os.Root, page bool) error {
	if !page {
		return experiment.WriteResults(root, s.results, nil)
	}
	return experiment.WriteResults(root, s.results, func(w io.Writer, r *experiment.Results) error {
		return report.Write(w, report.OfExperiment(s.Out, r))
	})
}

// end writes and shows the results.
func (s *scale) end(root *os.Root) error {
	if err := s.write(root, true); err != nil {
		return err
	}
	t := s.results.Table()
	t.Notes = append(t.Notes, "results     "+terminal.Name(s.Out))
	_, err := t.WriteTo(s.Stdout)
	return err
}

func (s *scale) finish() (int, error) {
	if err := s.end(s.store.Root); err != nil {
		return launch.ExitFailed, err
	}
	if slices.ContainsFunc(s.cells, func(c *cell) bool { return c.Status == experiment.OK }) {
		return launch.ExitDone, nil
	}
	return launch.ExitFailed, errors.New("no cell of the experiment succeeded; for the reasons, see the table and " +
		"the logs in " + terminal.Name(filepath.Join(s.store.Dir(), "cells")))
}
