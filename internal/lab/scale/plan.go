package scale

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/machine"
)

// plans plans the pending cells of this task. It fails if no cell can run.
func (s *scale) plans() error {
	at, err := s.site(s.Device)
	if err != nil {
		return err
	}
	s.results.Device, s.results.Machine = at.Device(), named(at.Machine)
	var refused []error
	good := false
	for _, c := range s.cells {
		if c.Status != experiment.Pending || !s.mine(c) {
			good = true
			continue
		}
		if c.why == nil {
			c.why = s.e.Place(s.plan(c))
		}
		c.Predict(c.plan)
		good = good || c.refusal() != experiment.Refused
		if c.why != nil {
			refused = append(refused, c.why)
		}
	}
	if !good {
		return &command.InputError{Err: s.e.Refuse(refused...)}
	}
	return nil
}

// site returns the machine of a device.
func (s *scale) site(device string) (at command.Site, err error) {
	at, known := s.sites[device]
	if !known {
		if at, err = s.Site(device, s.Assume, s.PlanOnly); err == nil {
			s.sites[device] = at
		}
	}
	return at, err
}

var errMemory = errors.New("out of memory")

// refusal returns the status of a cell that cannot run, or Pending.
func (c *cell) refusal() experiment.Status {
	switch {
	case c.why == nil:
		return experiment.Pending
	case errors.Is(c.why, errMemory):
		return experiment.OutOfMemory
	}
	return experiment.Refused
}

func (s *scale) plan(c *cell) error {
	c.device, c.nnodes = s.Device, 1
	if d := c.Text("device"); d != "" {
		c.device = d
	}
	at, err := s.site(c.device)
	if err != nil {
		return err
	}
	if n, ok := c.Number("nnodes"); ok {
		c.nnodes, at.Hosts = int(n), int(n)
	}
	if err := s.place(c, at.Machine); err != nil {
		return err
	}
	cfg, p, err := at.Plan(s.e.BasePath, c.nproc*c.nnodes, s.e.Flags(c.Cell, s.Set))
	if err != nil {
		return err
	}
	c.plan = experiment.Plan{
		Choices: experiment.Choices{
			Backend: cfg.Parallel.Backend, Layout: string(cfg.Parallel.Layout), Recompute: cfg.Memory.Recompute,
		},
		StepSeconds: p.Estimate.SecondsPerStep, Memory: byKind(&p.Memory),
	}
	if err := p.Memory.Check(); err != nil {
		return fmt.Errorf("%w: %w", errMemory, err)
	}
	return nil
}

// place sets the number of processes of a cell, and checks that this machine can start them.
func (s *scale) place(c *cell, m machine.Machine) (err error) {
	c.nproc = max(1, m.GPUs)
	if m.Assumed && c.nnodes > 1 {
		c.nproc = max(1, m.GPUs/c.nnodes) // gpus= of --assume counts all hosts
	}
	if s.NProc != "auto" {
		if c.nproc, err = command.Processes(s.NProc); err != nil {
			return err
		}
	}
	if n, ok := c.Number("nproc"); ok {
		c.nproc = int(n)
	}
	nodes, _ := strconv.Atoi(launch.Getenv("SLURM_JOB_NUM_NODES")) // 0 outside of a job
	switch most := command.MaxProcs(); {
	case s.PlanOnly && m.Assumed && c.nnodes == 1 && m.GPUs > 0 && c.nproc > m.GPUs:
		return fmt.Errorf("nproc %d: one process runs on each GPU, and --assume has gpus=%d", c.nproc, m.GPUs)
	case s.PlanOnly:
		return nil
	case m.GPUs > 0 && c.nproc > m.GPUs:
		return fmt.Errorf("nproc %d: one process runs on each GPU, and this machine has %d", c.nproc, m.GPUs)
	case c.nproc > most:
		return fmt.Errorf("nproc %d: this machine with %d cores runs at most %d processes", c.nproc, runtime.NumCPU(), most)
	case c.nnodes > 1 && s.Share == 0:
		return fmt.Errorf("nnodes %d: cells of several nodes need --slurm", c.nnodes)
	case c.nnodes > 1 && nodes < c.nnodes:
		return fmt.Errorf("nnodes %d: this array task has %d nodes", c.nnodes, nodes)
	}
	return nil
}

func byKind(m *plan.Memory) *experiment.Memory {
	k := &experiment.Memory{Weights: m.Weights + m.Compute, Gradients: m.Gradients, Optimizer: m.Optimizer,
		Activations: m.Activations}
	k.Workspace = m.Total - k.Total()
	return k
}

func named(m machine.Machine) string {
	text := m.String()
	if m.IsCPU() {
		text = fmt.Sprintf("%d cores", runtime.NumCPU())
	} else if !m.Assumed {
		text = m.Name + ", " + text
	}
	if m.GPUs > 0 {
		text = fmt.Sprintf("%d x %s", m.GPUs, text)
	}
	if m.Assumed {
		text += ", assumed"
	}
	return text
}

// planOnly writes the plans of the cells as results.
func (s *scale) planOnly() (int, error) {
	status := launch.ExitFailed
	for _, c := range s.cells {
		if c.why != nil {
			c.Status, c.Error = c.refusal(), oneLine(c.why)
		} else {
			c.Status, status = experiment.Planned, launch.ExitDone
		}
	}
	root, err := files.Make(s.Out)
	if err != nil {
		return 0, inputf("--out: %w", err)
	}
	defer root.Close()
	if err := s.end(root); err != nil {
		return launch.ExitFailed, err
	}
	return status, nil
}
