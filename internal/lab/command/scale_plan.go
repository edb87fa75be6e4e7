package command

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
)

// plans finds what each pending cell would do on this machine, or on the assumed one.
func (s *scale) plans() error {
	found := machines{}
	m, err := s.machineOf(found, s.Device)
	if err != nil {
		return err
	}
	s.device, s.on = m.Device(), named(m)
	var refused []error
	good := false
	for i := range s.cells {
		if s.cells[i].Status != experiment.Pending || !s.mine(i) {
			good = good || s.cells[i].Status != experiment.Skipped
			continue
		}
		w := &s.work[i]
		if w.status == experiment.Pending {
			w.why = s.e.Place(s.plan(i, found))
		}
		w.settle()
		s.cells[i].Predict(w.plan)
		good = good || w.status != experiment.Refused
		if w.why != nil {
			refused = append(refused, w.why)
		}
	}
	if !good {
		return &InputError{s.e.Refuse(refused...)}
	}
	return nil
}

// errMemory is the cause where a plan does not fit the memory.
var errMemory = errors.New("out of memory")

// settle sets the status that the faults of a plan mean.
func (w *cellWork) settle() {
	switch {
	case errors.Is(w.why, errMemory):
		w.status = experiment.OutOfMemory
	case w.why != nil:
		w.status = experiment.Refused
	}
}

// plan is what `cprun plan` would say of a cell.
func (s *scale) plan(i int, found machines) error {
	c, w := &s.cells[i], &s.work[i]
	w.device, w.nnodes = s.Device, 1
	if d := c.Text("device"); d != "" {
		w.device = d
	}
	m, err := s.machineOf(found, w.device)
	if err != nil {
		return err
	}
	if n, ok := c.Number("nnodes"); ok {
		w.nnodes, m.Hosts = int(n), int(n)
	}
	if err := s.place(c, w, m); err != nil {
		return err
	}
	ranks := w.nproc * w.nnodes
	d, err := s.decider(m)
	if err != nil {
		return err
	}
	load := config.Load
	if s.PlanOnly {
		load = loadPlanned
	}
	cfg, err := load(s.e.BasePath, config.Options{Set: s.flags(i), Ranks: ranks, Hosts: m.Hosts, Device: m.Device(),
		NoFiles: s.PlanOnly, Decide: d.Decide})
	if err == nil && !s.PlanOnly {
		_, err = train.Check(cfg)
	}
	if err != nil {
		return err
	}
	choice, err := choose(cfg, m, d.Chosen)
	if err != nil {
		return err
	}
	opts := planOptions(m, choice.Choice, s.costs.of(&s.Options, m))
	opts.Chosen, opts.Quick = d.Chosen, true
	p, err := plan.Make(cfg, ranks, opts)
	if err != nil {
		return err
	}
	w.plan = experiment.Plan{
		Choices: experiment.Choices{
			Backend: cfg.Parallel.Backend, Layout: cfg.Parallel.Layout, Recompute: cfg.Memory.Recompute,
		},
		StepSeconds: p.Estimate.SecondsPerStep, Memory: byKind(&p.Memory),
	}
	if err := p.Memory.Check(); err != nil {
		return fmt.Errorf("%w: %w", errMemory, err)
	}
	return nil
}

// place decides how many processes a cell has, and whether this machine starts as many.
func (s *scale) place(c *experiment.Cell, w *cellWork, m machine.Machine) error {
	w.nproc = max(1, m.GPUs)
	if m.Assumed && w.nnodes > 1 {
		w.nproc = max(1, m.GPUs/w.nnodes) // gpus= of --assume is of all
	}
	if s.NProc != "auto" {
		n, err := count(s.NProc)
		if err != nil {
			return err
		}
		w.nproc = n
	}
	if n, ok := c.Number("nproc"); ok {
		w.nproc = int(n)
	}
	switch {
	case s.PlanOnly && m.Assumed && w.nnodes == 1 && m.GPUs > 0 && w.nproc > m.GPUs:
		return fmt.Errorf("nproc %d: one process runs on each GPU, and --assume says gpus=%d", w.nproc, m.GPUs)
	case s.PlanOnly:
		return nil
	case m.GPUs > 0 && w.nproc > m.GPUs:
		return fmt.Errorf("nproc %d: one process runs on each GPU, and this machine has %d", w.nproc, m.GPUs)
	case w.nproc > maxProcs():
		return fmt.Errorf("nproc %d: at most %d processes are started on this machine with %d cores", w.nproc,
			maxProcs(), runtime.NumCPU())
	case w.nnodes > 1 && s.Share == 0:
		return fmt.Errorf("nnodes %d: cells of several nodes run under --slurm", w.nnodes)
	case w.nnodes > 1 && allocated() < w.nnodes:
		return fmt.Errorf("nnodes %d: this task of the array has %d", w.nnodes, allocated())
	}
	return nil
}

// allocated is how many nodes Slurm has given this job.
func allocated() int {
	n, _ := strconv.Atoi(launch.Getenv("SLURM_JOB_NUM_NODES")) // 0 outside of one
	return n
}

// byKind is a plan's memory in the kinds of a report.
func byKind(m *plan.Memory) *experiment.Memory {
	k := &experiment.Memory{Weights: m.Weights + m.Compute, Gradients: m.Gradients, Optimizer: m.Optimizer,
		Activations: m.Activations}
	k.Workspace = m.Total - k.Total()
	return k
}

// named is the machine for a reader.
func named(m machine.Machine) string {
	text := m.String()
	if m.IsCPU() {
		text = fmt.Sprintf("%d cores", runtime.NumCPU())
	} else if _, gpus, err := machine.Find(); !m.Assumed && err == nil && len(gpus) > 0 {
		text = gpus[0].Name + ", " + text
	}
	if m.GPUs > 0 {
		text = fmt.Sprintf("%d x %s", m.GPUs, text)
	}
	if m.Assumed {
		text += ", assumed"
	}
	return text
}

// planOnly writes what is predicted.
func (s *scale) planOnly() (int, error) {
	any := false
	for i := range s.cells {
		c, w := &s.cells[i], &s.work[i]
		if c.Status != experiment.Pending {
			continue
		}
		c.Status = experiment.Planned
		if w.status != experiment.Pending {
			c.Status, c.Error = w.status, oneLine(w.why)
		}
		any = any || c.Status == experiment.Planned
	}
	r := s.results()
	root, err := files.Make(s.Out)
	if err != nil {
		return 0, inputf("--out: %w", err)
	}
	defer root.Close()
	if err := experiment.WriteResults(root, r, s.report); err != nil {
		return launch.ExitFailed, err
	}
	if err := s.show(r); err != nil || !any {
		return launch.ExitFailed, err
	}
	return launch.ExitDone, nil
}

// maxReason is the longest reason that a results file has, in bytes.
const maxReason = 600

// oneLine is an error as a results file has it.
func oneLine(err error) string {
	if err == nil {
		return ""
	}
	text := strings.TrimPrefix(err.Error(), errMemory.Error()+": ")
	lines := slices.DeleteFunc(strings.Split(terminal.Text(text), "\n"),
		func(l string) bool { return strings.TrimSpace(l) == "" })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return terminal.Clip(strings.Join(lines, "; "), maxReason)
}
