package command

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

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/lab/report"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
)

// ScaleOptions are the flags of `cprun scale`.
type ScaleOptions struct {
	Options
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
	*ScaleOptions
	e      *experiment.Experiment
	id     experiment.Identity
	cells  []experiment.Cell
	work   []cellWork // parallel to cells
	device string     // default device of cells: cpu or cuda
	on     string     // description of the machine
	store  *experiment.Store
	out    *progress.Printer
	share  map[string]bool // the cells of this array task; nil: all
	sites  map[string]site // machines by --device
}

type cellWork struct {
	config        []byte // train.yaml, autos unresolved; nil if it has faults
	nproc, nnodes int
	device        string // value of --device
	steps         int
	plan          experiment.Plan
	status        experiment.Status // Pending, or the reason not to run it
	why           error
}

// Scale runs, plans or submits an experiment, and returns the exit status.
func Scale(path string, o ScaleOptions) (int, error) {
	signals := launch.CatchSignals()
	defer signals.Release()
	s := &scale{ScaleOptions: &o, sites: map[string]site{}}
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
	if s.store, err = experiment.Open(o.Out, experiment.Options{
		Header: experiment.Header{
			Version: experiment.Version, Identity: s.id, Created: time.Now().UTC().Truncate(time.Second),
			Command: shell(o.Args), Commit: o.Version, Machine: s.on, Device: s.device,
		},
		Anew: o.Resume == "never", Share: o.Share,
	}); err != nil {
		return 0, &InputError{err}
	}
	defer s.store.Close()
	experiment.Settle(s.cells, s.store.Runs, s.e.Repeat)
	switch {
	case o.Slurm:
		return s.submit()
	case o.Gather:
		return s.finish()
	}
	return s.run(signals)
}

// check reports every fault of the input and plans each pending cell. It writes nothing.
func (s *scale) check(path string) (err error) {
	if s.Resume != "auto" && s.Resume != "never" {
		return inputf("--resume %q: want auto or never", s.Resume)
	}
	if len(s.Assume) > 0 && !s.PlanOnly {
		return inputf("--assume needs --plan: runs use this machine")
	}
	if len(s.Sbatch) > 0 && !s.Slurm {
		return inputf("--sbatch needs --slurm: it has the arguments of the jobs")
	}
	if s.Slurm && s.PlanOnly {
		return inputf("--slurm with --plan: a plan needs no job; drop one of the two")
	}
	if s.e, err = experiment.Load(path); err == nil {
		err = s.configs()
	}
	if err != nil {
		return &InputError{err}
	}
	if err := s.directory(); err != nil {
		return err
	}
	if s.Resume == "auto" && !s.PlanOnly {
		runs, _ := experiment.Peek(s.Out, s.id)
		experiment.Settle(s.cells, runs, s.e.Repeat)
	}
	if s.Slurm || s.Gather { // the cells run on other machines
		s.device, s.on = s.Device, "several nodes of a Slurm cluster"
		if job := s.queued(); s.Slurm && job != "" {
			return inputf("--slurm: job %s still runs the cells; wait for it, or end it with "+"scancel %s", job, job)
		}
		return nil
	}
	alone := s.Options
	alone.Quiet = alone.Quiet || s.Share > 0 // a task has more nodes for cells of several nodes
	if err := alone.oneNode(); err != nil {
		return err
	}
	if s.Share > 0 {
		if err := s.deal(); err != nil {
			return err
		}
	}
	return s.plans()
}

// configs loads the configs of all cells, and checks them without a machine.
func (s *scale) configs() error {
	for _, flag := range s.Set {
		key, _, _ := strings.Cut(flag, "=")
		if slices.ContainsFunc(s.e.Grid, func(a experiment.Axis) bool { return a.Key == strings.TrimSpace(key) }) {
			return fmt.Errorf("--set %s: the grid also sets this key; remove one of the two", terminal.Name(flag))
		}
	}
	s.cells = s.e.Cells()
	s.work = make([]cellWork, len(s.cells))
	var texts [][]byte
	var faults []error
	good := 0
	for i := range s.cells {
		if s.cells[i].Status == experiment.Skipped {
			continue
		}
		w := &s.work[i]
		w.status = experiment.Pending
		cfg, err := config.Load(s.e.BasePath, config.Options{Set: s.flags(i), NoFiles: s.PlanOnly || s.Slurm ||
			s.Gather})
		if err == nil && cfg.Train.Epochs > 0 {
			_, err = train.Check(cfg)
		}
		if err != nil {
			w.status, w.why, faults = experiment.Refused, s.e.Place(err), append(faults, err)
		} else {
			good++
			w.config, w.steps = cfg.YAML(), cfg.Train.Steps
			if w.steps <= s.e.Warmup {
				return s.e.Faultf("warmup", "%d warmup steps leave none to count, since train.steps is %d; lower "+
					"warmup or raise train.steps", s.e.Warmup, w.steps)
			}
		}
		texts = append(texts, w.config)
	}
	switch {
	case len(texts) == 0:
		return s.e.Faultf("skip", "it skips every cell")
	case good == 0:
		return s.e.Refuse(faults...)
	}
	s.id = s.e.Identity(texts, map[string]string{"--nproc": s.NProc, "--device": s.Device})
	return nil
}

func (s *scale) flags(i int) []string { return s.e.Flags(&s.cells[i], s.Set) }

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
	if s.PlanOnly {
		if _, err := os.Stat(filepath.Join(abs, "cells.jsonl")); err == nil {
			return inputf("--out: %s has results of runs, which a plan would overwrite; name another directory",
				terminal.Name(abs))
		}
	}
	return nil
}

func (s *scale) done(runs []experiment.Run) bool {
	cells := slices.Clone(s.cells)
	experiment.Settle(cells, runs, s.e.Repeat)
	return !slices.ContainsFunc(cells, func(c experiment.Cell) bool { return !c.Done() })
}

// A site is the machine of a device, with its costs.
type site struct {
	machine.Machine
	costs plan.Costs
}

func (s *scale) site(device string) (at site, err error) {
	if at, ok := s.sites[device]; ok {
		return at, nil
	}
	o := PlanOptions{Options: s.Options, Assume: s.Assume}
	o.Device, o.NProc = device, "auto"
	if s.PlanOnly {
		at.Machine, _, err = o.where()
	} else {
		_, err = o.resolve()
		at.Machine = o.machine
	}
	if err == nil {
		at.costs = s.Options.costs(at.Machine)
		s.sites[device] = at
	}
	return at, err
}

func (s *scale) results() *experiment.Results {
	r := &experiment.Results{
		Version: experiment.Version, Name: s.e.Name, Command: shell(s.Args), Commit: s.Version, Machine: s.on,
		Device:  s.device,
		Created: time.Now().UTC().Truncate(time.Second), Base: s.e.Base, Grid: s.e.Grid,
		Set: maps.Clone(s.e.Set), Cells: s.cells,
	}
	for _, flag := range s.Set {
		key, value, _ := strings.Cut(flag, "=")
		r.Set[strings.TrimSpace(key)] = value
	}
	if s.store != nil { // from the first start
		h := &s.store.Header
		r.Command, r.Commit, r.Created, r.Machine, r.Device = h.Command, h.Commit, h.Created, h.Machine, h.Device
	}
	return r
}

func (s *scale) report(w io.Writer, r *experiment.Results) error {
	return report.Write(w, report.OfExperiment(s.Out, r))
}

func (s *scale) finish() (int, error) {
	r := s.results()
	if err := experiment.WriteResults(s.store.Root, r, s.report); err != nil {
		return launch.ExitFailed, err
	}
	if err := s.show(r); err != nil {
		return launch.ExitFailed, err
	}
	if slices.ContainsFunc(s.cells, func(c experiment.Cell) bool { return c.Status == experiment.OK }) {
		return launch.ExitDone, nil
	}
	return launch.ExitFailed, errors.New("no cell of the experiment succeeded; for the reasons, see the table and " +
		"the logs in " + terminal.Name(filepath.Join(s.store.Dir(), "cells")))
}

func (s *scale) show(r *experiment.Results) error {
	t := readable.Table{Title: fmt.Sprintf("%s on %s", r.Name, r.Machine)}
	type column struct {
		head string
		of   func(c *experiment.Cell) string
	}
	var all []column
	for _, a := range r.Grid {
		all = append(all, column{a.Key, func(c *experiment.Cell) string { return sizeText(c.Values[a.Key]) }})
	}
	all = append(all,
		column{"backend", func(c *experiment.Cell) string { return c.Backend }},
		column{"layout", func(c *experiment.Cell) string { return c.Layout }},
		column{"recompute", func(c *experiment.Cell) string { return c.Recompute }},
		column{"status", func(c *experiment.Cell) string { return string(c.Status) }},
		column{"step s", func(c *experiment.Cell) string { return figure(c.StepSeconds) }},
		column{"min", func(c *experiment.Cell) string { return figure(c.StepSecondsMin) }},
		column{"max", func(c *experiment.Cell) string { return figure(c.StepSecondsMax) }},
		column{"predicted s", func(c *experiment.Cell) string { return figure(c.PredictedStepSeconds) }},
		column{"tok/s", func(c *experiment.Cell) string {
			if c.TokensPerSecond == 0 {
				return ""
			}
			return readable.Count(int64(c.TokensPerSecond + 0.5))
		}},
		column{"TFLOP/s a device", func(c *experiment.Cell) string { return figure(c.TFLOPsPerDevice) }},
		column{"MFU %", func(c *experiment.Cell) string { return figure(100 * c.MFU) }},
		column{"GiB", func(c *experiment.Cell) string { return figure(float64(c.MemoryBytes) / (1 << 30)) }},
		column{"planned GiB", func(c *experiment.Cell) string {
			return figure(float64(c.PlannedMemoryBytes) / (1 << 30))
		}},
		column{"wait ms", func(c *experiment.Cell) string {
			if c.CommWaitSeconds == nil {
				return ""
			}
			return figure(1e3 * *c.CommWaitSeconds)
		}},
	)
	cells := slices.DeleteFunc(slices.Clone(r.Cells), func(c experiment.Cell) bool {
		return c.Status == experiment.Skipped
	})
	t.Rows = make([][]string, len(cells))
	for _, col := range all {
		if !slices.ContainsFunc(cells, func(c experiment.Cell) bool { return col.of(&c) != "" }) {
			continue // for example the MFU of a CPU
		}
		t.Head = append(t.Head, col.head)
		for i := range cells {
			t.Rows[i] = append(t.Rows[i], terminal.Clip(terminal.Name(col.of(&cells[i])), 40))
		}
	}
	more := map[string]int{} // cells by reason
	for i := range r.Cells {
		more[r.Cells[i].Error]++
	}
	for i := range r.Cells {
		c := &r.Cells[i]
		if c.Error == "" || more[c.Error] == 0 {
			continue
		}
		who := s.values(i)
		if n := more[c.Error] - 1; n > 0 {
			who += fmt.Sprintf(" and %d more", n)
		}
		more[c.Error] = 0
		t.Notes = append(t.Notes, fmt.Sprintf("%s  %s: %s", who, c.Status, terminal.Clip(c.Error, 200)))
	}
	t.Notes = append(t.Notes, "results     "+terminal.Name(s.Out))
	_, err := t.WriteTo(s.Stdout)
	return err
}

func figure(x float64) string {
	if x == 0 {
		return ""
	}
	return readable.Number(x)
}

// sizeText formats a value of the grid: 131072 is 128K.
func sizeText(value any) string {
	if n, ok := value.(int64); ok {
		return readable.Size(n)
	}
	return experiment.Text(value)
}
