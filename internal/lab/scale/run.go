package scale

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/bench"
)

// grace bounds the end of a run after a request. A run ends between steps, and long sequences make long steps.
const grace = 20 * time.Second

// again bounds the time in which several signals count as one request.
const again = 100 * time.Millisecond

func (s *scale) run(signals *launch.Signals) (int, error) {
	if err := s.recordRefused(); err != nil {
		return launch.ExitFailed, err
	}
	order := s.order()
	s.out = s.Printer()
	defer s.out.Close()
	s.out.Note("experiment directory " + terminal.Name(s.store.Dir()))
	for round := 1; round <= s.e.Repeat; round++ { // every cell runs once before any runs twice
		for i, c := range order {
			if c.Done() || s.has(c, round) {
				continue
			}
			place := fmt.Sprintf("cell %d of %d", i+1, len(order))
			if code, err := s.runCell(c, round, place, signals); code != launch.ExitDone || err != nil {
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
	for _, c := range s.cells {
		if c.Status != experiment.Pending || c.why == nil || !s.mine(c) {
			continue
		}
		err := s.store.Append(experiment.Run{
			Cell: c.ID, Run: 1, Status: c.refusal(), Error: oneLine(c.why), Ended: time.Now().UTC(), Commit: s.Version,
			Plan: c.plan,
		})
		if err != nil {
			return err
		}
	}
	s.settle(s.store.Runs)
	return nil
}

// order returns this task's pending cells in the order of their predicted time.
func (s *scale) order() (list []*cell) {
	for _, c := range s.cells {
		if c.Status == experiment.Pending && s.mine(c) {
			list = append(list, c)
		}
	}
	seconds := func(c *cell) float64 { return c.plan.StepSeconds * float64(c.steps) }
	slices.SortStableFunc(list, func(a, b *cell) int { return cmp.Compare(seconds(a), seconds(b)) })
	return list
}

func (s *scale) has(c *cell, round int) bool {
	return slices.ContainsFunc(s.store.Runs, func(r experiment.Run) bool { return r.Cell == c.ID && r.Run == round })
}

// runCell runs a cell once. A status other than launch.ExitDone ends the command.
func (s *scale) runCell(c *cell, round int, place string, signals *launch.Signals) (int, error) {
	dir, file, err := s.store.Prepare(c.ID, round, c.config)
	if err != nil {
		return launch.ExitFailed, err
	}
	out, began := &output{}, time.Now()
	p, err := launch.StartProgram(c.before(), s.arguments(c, dir, file), out)
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
		Commit: s.Version, Dir: dir, Plan: c.plan,
	}
	r.Status, r.Error = s.outcome(code, late, out.tail())
	s.measure(&r)
	if err := s.store.Append(r); err != nil {
		return launch.ExitFailed, err
	}
	s.settle(s.store.Runs)
	s.out.Note(place + "  " + s.line(c, &r))
	if s.Share == 0 {
		err = s.write(s.store.Root, false)
	}
	return launch.ExitDone, err
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
		if time.Since(first) >= again && (more == "SIGINT" || more == "SIGTERM" && !command.UnderSlurm()) {
			p.Interrupt()
			code = launch.ExitInterrupted
		}
	}
	err := s.store.Root.RemoveAll(dir)
	if s.Share == 0 {
		err = errors.Join(err, s.write(s.store.Root, true))
	}
	s.out.Note("stopped; to resume: " + s.resumeCommand())
	return code, err
}

func (s *scale) resumeCommand() string {
	args := command.Resuming(s.Args)
	if !slices.ContainsFunc(args, func(a string) bool { return a == "--out" || strings.HasPrefix(a, "--out=") }) {
		args = append(args, "--out", s.store.Dir())
	}
	return command.Shell(args)
}

func (s *scale) arguments(c *cell, dir, file string) []string {
	args := []string{
		"--nproc", strconv.Itoa(c.nproc), "--device", c.device, "--resume", "never", "--run-dir",
		filepath.Join(s.store.Dir(), dir),
	}
	if !s.e.Saves() {
		args = append(args, "--no-checkpoint")
	}
	return append(args, filepath.Join(s.store.Dir(), file))
}

// before returns the start of the command line of a cell of several nodes.
func (c *cell) before() []string {
	if c.nnodes == 1 {
		return nil
	}
	n := strconv.Itoa(c.nnodes)
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

func (s *scale) line(c *cell, r *experiment.Run) string {
	text := s.results.Label(c.Cell)
	if s.e.Repeat > 1 {
		text += fmt.Sprintf("  run %d of %d", r.Run, s.e.Repeat)
	}
	text += "  " + string(r.Status)
	if r.Error != "" {
		text += ": " + terminal.Clip(r.Error, 200)
	} else if r.Counted != nil {
		text += fmt.Sprintf("  %s s a step  %s", readable.Number(bench.Median(r.Counted.StepSeconds)),
			readable.Rate(bench.Median(r.Counted.TokensPerSecond)))
	}
	return text
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
