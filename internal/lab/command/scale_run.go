package command

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/train"
)

// grace bounds the end of a run after a request. A run ends between steps, and long sequences make long steps.
const grace = 20 * time.Second

// again is the time in which several signals count as one request.
const again = 100 * time.Millisecond

func (s *scale) run(signals *launch.Signals) (int, error) {
	if err := s.recordRefused(); err != nil {
		return launch.ExitFailed, err
	}
	order := s.order()
	s.out = s.printer()
	defer s.out.Close()
	s.out.Note("experiment directory " + terminal.Name(s.store.Dir()))
	for round := 1; round <= s.e.Repeat; round++ { // every cell runs once before any runs twice
		for _, i := range order {
			if s.cells[i].Done() || s.has(i, round) {
				continue
			}
			if code, err := s.runCell(i, round, order, signals); code != launch.ExitDone || err != nil {
				return code, err
			}
		}
	}
	if s.Share > 0 { // another job gathers the results of all shares
		return launch.ExitDone, nil
	}
	return s.finish()
}

func (s *scale) recordRefused() error {
	for i := range s.cells {
		w := &s.work[i]
		if s.cells[i].Status != experiment.Pending || w.status == experiment.Pending || !s.mine(i) {
			continue
		}
		err := s.store.Append(experiment.Run{
			Cell: s.cells[i].ID, Run: 1, Status: w.status, Error: oneLine(w.why), Ended: time.Now().UTC(),
			Commit: s.Version, Plan: w.plan,
		})
		if err != nil {
			return err
		}
	}
	experiment.Settle(s.cells, s.store.Runs, s.e.Repeat)
	return nil
}

// order returns the indices of this task's pending cells, in the order of their predicted time.
func (s *scale) order() (list []int) {
	for i := range s.cells {
		if s.cells[i].Status == experiment.Pending && s.mine(i) {
			list = append(list, i)
		}
	}
	seconds := func(i int) float64 { return s.work[i].plan.StepSeconds * float64(s.work[i].steps) }
	slices.SortStableFunc(list, func(a, b int) int { return cmp.Compare(seconds(a), seconds(b)) })
	return list
}

func (s *scale) has(i, round int) bool {
	return slices.ContainsFunc(s.store.Runs, func(r experiment.Run) bool {
		return r.Cell == s.cells[i].ID && r.Run == round
	})
}

// runCell runs a cell once. A status other than launch.ExitDone ends the command.
func (s *scale) runCell(i, round int, order []int, signals *launch.Signals) (int, error) {
	c, w := &s.cells[i], &s.work[i]
	dir, file, err := s.store.Prepare(c.ID, round, w.config)
	if err != nil {
		return launch.ExitFailed, err
	}
	out, began := &output{}, time.Now()
	p, err := launch.StartProgram(s.before(w), s.arguments(w, dir, file), out)
	if err != nil {
		return launch.ExitFailed, fmt.Errorf("cell %s: %w", c.ID, err)
	}
	code, late := 0, false
	asked, _ := signals.Before(func() error {
		code, late = p.Wait(s.e.Limit, grace)
		return nil
	})
	if asked != "" {
		return s.stop(p, asked, dir, signals)
	}
	r := experiment.Run{
		Cell: c.ID, Run: round, Ended: time.Now().UTC().Truncate(time.Second), Seconds: time.Since(began).Seconds(),
		Commit: s.Version, Dir: dir, Plan: w.plan,
	}
	r.Status, r.Error = s.outcome(code, late, out.tail())
	s.measure(&r)
	if err := s.store.Append(r); err != nil {
		return launch.ExitFailed, err
	}
	experiment.Settle(s.cells, s.store.Runs, s.e.Repeat)
	s.out.Note(s.line(i, &r, order))
	if s.Share == 0 {
		return launch.ExitDone, experiment.WriteResults(s.store.Root, s.results(), nil)
	}
	return launch.ExitDone, nil
}

func (s *scale) stop(p *launch.Program, asked, dir string, signals *launch.Signals) (int, error) {
	first := time.Now()
	s.out.Note(asked + ": ending the running cell; a second request ends it at once")
	p.Terminate()
	code := launch.ExitStopped
	for {
		more, _ := signals.Before(func() error { p.Wait(grace, grace); return nil })
		if more == "" {
			break
		}
		if time.Since(first) >= again && (more == "SIGINT" || more == "SIGTERM" && !underSlurm()) {
			p.Interrupt()
			code = launch.ExitInterrupted
		}
	}
	err := s.store.Root.RemoveAll(dir)
	if s.Share == 0 {
		err = errors.Join(err, experiment.WriteResults(s.store.Root, s.results(), s.report))
	}
	s.out.Note("stopped; to resume: " + s.resumeCommand())
	return code, err
}

func (s *scale) resumeCommand() string {
	args := resuming(s.Args)
	if !slices.ContainsFunc(args, func(a string) bool { return a == "--out" || strings.HasPrefix(a, "--out=") }) {
		args = append(args, "--out", s.store.Dir())
	}
	return shell(args)
}

func (s *scale) arguments(w *cellWork, dir, file string) []string {
	args := []string{
		"--nproc", strconv.Itoa(w.nproc), "--device", w.device, "--resume", "never", "--run-dir",
		filepath.Join(s.store.Dir(), dir),
	}
	if !s.e.Saves() {
		args = append(args, "--no-checkpoint")
	}
	return append(args, filepath.Join(s.store.Dir(), file))
}

func (s *scale) before(w *cellWork) []string {
	if w.nnodes == 1 {
		return nil
	}
	n := strconv.Itoa(w.nnodes)
	return []string{"srun", "--nodes=" + n, "--ntasks=" + n, "--ntasks-per-node=1", "--cpu-bind=none",
		"--kill-on-bad-exit=0"}
}

func (s *scale) outcome(code int, late bool, tail string) (experiment.Status, string) {
	reason := reasonOf(tail)
	why := oneLine(errors.New(reason))
	switch {
	case code == launch.ExitDone:
		return experiment.OK, ""
	case late:
		return experiment.Timeout, fmt.Sprintf("not finished within the limit of %s", config.FormatTime(s.e.Limit))
	case launch.OutOfMemory(reason) || strings.Contains(reason, "does NOT fit"):
		return experiment.OutOfMemory, why
	case code == launch.ExitInput:
		return experiment.Refused, why
	case code == launch.ExitStopped || code == launch.ExitInterrupted:
		return experiment.Failed, "another process stopped it"
	case why == "" && code < 0:
		return experiment.Failed, "cprun was killed"
	case why == "":
		return experiment.Failed, fmt.Sprintf("exit status %d", code)
	}
	return experiment.Failed, why
}

// failedRank matches the first line of the report on a failure.
var failedRank = regexp.MustCompile(`^cprun: (rank \d+ failed|node )`)

func reasonOf(tail string) string {
	lines := strings.Split(strings.TrimRight(tail, "\n"), "\n")
	at := -1
	for i, line := range lines {
		if failedRank.MatchString(line) || strings.HasPrefix(line, "cprun: ") &&
			(at < 0 || !failedRank.MatchString(lines[at])) {
			at = i
		}
	}
	if at < 0 {
		return lines[len(lines)-1]
	}
	var reason []string
	for i, line := range lines[at:] {
		if i > 0 && strings.HasPrefix(line, "cprun: ") || strings.HasPrefix(line, "  log:") ||
			strings.HasPrefix(line, "  hint:") {
			break
		}
		reason = append(reason, strings.TrimPrefix(line, "cprun: "))
	}
	return strings.Join(reason, "\n")
}

func (s *scale) measure(r *experiment.Run) {
	steps, err := bench.ReadMetrics(filepath.Join(s.store.Dir(), r.Dir, "metrics.jsonl"))
	if err == nil {
		r.Counted = bench.Count(steps, s.e.Warmup)
	}
	if r.Status == experiment.OK && r.Counted == nil {
		r.Status, r.Error = experiment.Failed, "it logged no step after the warmup"
		if err != nil {
			r.Error = oneLine(err)
		}
	}
}

func (s *scale) line(i int, r *experiment.Run, order []int) string {
	text := fmt.Sprintf("cell %d of %d  %s", slices.Index(order, i)+1, len(order), s.values(i))
	if s.e.Repeat > 1 {
		text += fmt.Sprintf("  run %d of %d", r.Run, s.e.Repeat)
	}
	text += "  " + string(r.Status)
	if r.Error != "" {
		text += ": " + terminal.Clip(r.Error, 200)
	} else if r.Counted != nil {
		text += fmt.Sprintf("  %s s a step  %s", figure(bench.Median(r.Counted.StepSeconds)),
			readable.Rate(bench.Median(r.Counted.TokensPerSecond)))
	}
	return text
}

func (s *scale) values(i int) string {
	var parts []string
	for _, a := range s.e.Grid {
		_, name, nested := strings.Cut(a.Key, ".")
		if !nested {
			name = a.Key
		}
		parts = append(parts, name+"="+sizeText(s.cells[i].Values[a.Key]))
	}
	return strings.Join(parts, " ")
}

type output struct {
	mu   sync.Mutex
	text []byte // guarded by mu
}

const maxTail = 64 << 10

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, b...)
	if extra := len(o.text) - maxTail; extra > 0 {
		o.text = slices.Delete(o.text, 0, extra)
	}
	return len(b), nil
}

func (o *output) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.text)
}

func (s *scale) plans() error {
	at, err := s.site(s.Device)
	if err != nil {
		return err
	}
	s.device, s.on = at.Device(), named(at.Machine)
	var refused []error
	good := false
	for i := range s.cells {
		if s.cells[i].Status != experiment.Pending || !s.mine(i) {
			good = good || s.cells[i].Status != experiment.Skipped
			continue
		}
		w := &s.work[i]
		if w.status == experiment.Pending {
			w.why = s.e.Place(s.plan(i))
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

var errMemory = errors.New("out of memory")

func (w *cellWork) settle() {
	switch {
	case errors.Is(w.why, errMemory):
		w.status = experiment.OutOfMemory
	case w.why != nil:
		w.status = experiment.Refused
	}
}

func (s *scale) plan(i int) error {
	c, w := &s.cells[i], &s.work[i]
	w.device, w.nnodes = s.Device, 1
	if d := c.Text("device"); d != "" {
		w.device = d
	}
	at, err := s.site(w.device)
	if err != nil {
		return err
	}
	m := at.Machine
	if n, ok := c.Number("nnodes"); ok {
		w.nnodes, m.Hosts = int(n), int(n)
	}
	if err := s.place(c, w, m); err != nil {
		return err
	}
	load := loadPlanned
	if !s.PlanOnly {
		load = func(path string, o config.Options) (*config.Config, error) {
			cfg, err := config.Load(path, o)
			if err == nil {
				_, err = train.Check(cfg)
			}
			return cfg, err
		}
	}
	d, err := s.decider(m)
	if err != nil {
		return err
	}
	cfg, p, err := quick(load, s.e.BasePath, d, w.nproc*w.nnodes, at.costs,
		config.Options{Set: s.flags(i), NoFiles: s.PlanOnly})
	if err != nil {
		return err
	}
	w.plan = experiment.Plan{
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
func (s *scale) place(c *experiment.Cell, w *cellWork, m machine.Machine) error {
	w.nproc = max(1, m.GPUs)
	if m.Assumed && w.nnodes > 1 {
		w.nproc = max(1, m.GPUs/w.nnodes) // gpus= of --assume counts all hosts
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
		return fmt.Errorf("nproc %d: one process runs on each GPU, and --assume has gpus=%d", w.nproc, m.GPUs)
	case s.PlanOnly:
		return nil
	case m.GPUs > 0 && w.nproc > m.GPUs:
		return fmt.Errorf("nproc %d: one process runs on each GPU, and this machine has %d", w.nproc, m.GPUs)
	case w.nproc > maxProcs():
		return fmt.Errorf("nproc %d: this machine with %[3]d cores runs at most %[2]d processes", w.nproc,
			maxProcs(), runtime.NumCPU())
	case w.nnodes > 1 && s.Share == 0:
		return fmt.Errorf("nnodes %d: cells of several nodes need --slurm", w.nnodes)
	case w.nnodes > 1 && allocated() < w.nnodes:
		return fmt.Errorf("nnodes %d: this array task has %d nodes", w.nnodes, allocated())
	}
	return nil
}

func allocated() int {
	n, _ := strconv.Atoi(launch.Getenv("SLURM_JOB_NUM_NODES")) // 0 outside of one
	return n
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

const maxReason = 600

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
