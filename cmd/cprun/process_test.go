package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// endless is a number of steps that no test reaches.
const endless = 1000000

// The failed rank comes last on the terminal, after which no trace is missed. A run that is done misses it.
func TestFailedRankComesLast(t *testing.T) {
	t.Parallel()
	for blocked, want := range map[string]int{"logs/trace-rank-0000.json": 1, "trace.json": 0} {
		dir := t.TempDir()
		write(t, filepath.Join(dir, blocked), "x", "")
		code, _, stderr := cprun(t, "--run-dir", dir, "--set", "log.trace_steps=1", small(t, 1))
		_, after, _ := strings.Cut(stderr, "rank 0 failed")
		if code != want || strings.Contains(after, "merged trace") || code == 0 && !strings.Contains(stderr, "merged trace") {
			t.Errorf("%s is a directory: exit status %d\n%s", blocked, code, stderr)
		}
		contains(t, "the launcher's log", content(t, dir, "logs/launcher.log"), "merged trace")
	}
}

func TestTrainWritesTheRunDirectory(t *testing.T) {
	t.Parallel()
	dir, stderr := trains(t, "--nproc", "3", "--set", "checkpoint.every=4", "--set", "log.trace_steps=2", small(t, 10))
	for _, f := range []string{
		"config.yaml", "plan.json", "metrics.jsonl", "logs/rank-0000.log", "logs/rank-0002.log", "trace.json",
		"checkpoints/latest", "checkpoints/step-00000010/manifest.json", "checkpoints/step-00000004/manifest.json",
	} {
		if _, err := os.Stat(filepath.Join(dir, f)); err != nil {
			t.Errorf("%v", err)
		}
	}
	if events, _ := filepath.Glob(filepath.Join(dir, "*tfevents*")); len(events) != 1 {
		t.Errorf("event files: %v, want one", events)
	}
	if latest := content(t, dir, "checkpoints/latest"); latest != "step-00000010\n" {
		t.Errorf("latest is %q", latest)
	}
	ms := metricsOf(t, dir)
	if len(ms) != 10 {
		t.Fatalf("%d lines of metrics, want 10", len(ms))
	}
	for _, key := range []string{"step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second",
		"tokens_per_second_per_device", "tflops_per_device", "mfu", "memory_bytes", "comm_wait_seconds",
		"attention_imbalance", "attention_bytes"} {
		if _, ok := ms[0][key]; !ok {
			t.Errorf("metrics have no %s: %v", key, ms[0])
		}
	}
	contains(t, "the terminal", stderr, "step 10/10", dir)
	// A run ends with the command to generate text.
	if want := " generate " + dir + " --prompt The\n"; !strings.HasSuffix(stderr, want) {
		t.Errorf("it ends without %q:\n%s", want, stderr)
	}
	// The resolved config runs unchanged, to the same losses.
	again, _ := trains(t, "--nproc", "3", filepath.Join(dir, "config.yaml"))
	alike(t, "the resolved config", again, dir)
}

// TestErrorOfTheLauncherIsPrintedOnce lets the launcher fail before it starts a worker.
func TestErrorOfTheLauncherIsPrintedOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "logs", "rank-0000.log"), "x", "")
	code, _, stderr := cprun(t, "--run-dir", dir, small(t, 1))
	if want := "cprun: log of rank 0: "; code != 1 || strings.Count(stderr, want) != 1 {
		t.Errorf("status %d, %q not once in\n%s", code, want, stderr)
	}
}

func TestKilledWorkerIsNamedAndNothingIsLeft(t *testing.T) {
	t.Parallel()
	s := start(t, filepath.Join(t.TempDir(), "run"), "--nproc", "4", small(t, endless))
	s.afterStep(3)
	workers := s.workers()
	if len(workers) != 4 {
		t.Fatalf("workers %v, want 4", workers)
	}
	victim := workers[2]
	rank := rankOf(t, victim)
	signal(t, syscall.SIGKILL, victim)
	s.ends(1)
	gone(t, workers)
	lines := strings.Split(strings.TrimSpace(s.said()), "\n")
	last := strings.Join(lines[max(0, len(lines)-5):], "\n")
	if !strings.Contains(last, fmt.Sprintf("rank %d failed", rank)) || !strings.Contains(last, "SIGKILL") {
		t.Errorf("the last lines do not name rank %d and SIGKILL:\n%s", rank, s.said())
	}
}

func TestKilledLauncherLeavesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, filepath.Join(t.TempDir(), "run"), "--nproc", "3", small(t, endless))
	s.afterStep(1)
	workers := s.workers()
	if len(workers) != 3 {
		t.Fatalf("workers %v, want 3", workers)
	}
	s.Process.Kill()
	s.Wait()
	gone(t, workers)
}

// A stopped and resumed run must have the losses of an uninterrupted one.
func TestSIGTERMCheckpointsAndResumeRepeats(t *testing.T) {
	t.Parallel()
	for _, shard := range []string{"none", "parameters"} {
		t.Run(shard, func(t *testing.T) {
			flags := []string{"--nproc", "4", "--set", "memory.shard=" + shard}
			dir := filepath.Join(t.TempDir(), "run")
			s := start(t, dir, append(flags, small(t, endless))...)
			s.afterStep(5)
			workers := s.workers()
			s.stop()
			gone(t, workers)
			stopped := len(metricsOf(t, dir))
			steps := stopped + 5
			must(t, append(flags, "--run-dir", dir, "--set", fmt.Sprintf("train.steps=%d", steps),
				small(t, endless))...)

			whole, _ := trains(t, append(flags, small(t, steps))...)
			alike(t, fmt.Sprintf("stopped after step %d and gone on", stopped), dir, whole)
		})
	}
}

// The command printed by a stopped run resumes it, even without --run-dir. The launcher's log contains all output, and
// the changed keys of the next start.
func TestTheNamedCommandGoesOn(t *testing.T) {
	t.Parallel()
	config, work := small(t, endless), t.TempDir()
	p := process(t, "--nproc", "2", "--resume", "never", config)
	p.Dir = work
	s := launched(t, p)
	s.until("step 2", func() bool { return strings.Contains(s.said(), "step 2/") })
	s.stop()
	again := s.resumes()
	dirs, err := filepath.Glob(filepath.Join(work, "runs", "*"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("run directories %q, %v", dirs, err)
	}
	stopped := len(metricsOf(t, dirs[0]))
	c := exec.Command("sh", "-c", again+fmt.Sprintf(" --set train.steps=%d", stopped+3))
	c.Dir, c.Env = work, s.Env
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", again, err, out)
	}
	contains(t, again, string(out), fmt.Sprintf("going on from step %d ", stopped))
	if n := len(metricsOf(t, dirs[0])); n != stopped+3 {
		t.Errorf("%d steps in the metrics, want %d", n, stopped+3)
	}
	contains(t, "launcher.log", content(t, dirs[0], "logs", "launcher.log"), "Z run directory ", "to resume: "+again,
		fmt.Sprintf("train.steps: %d -> %d", endless, stopped+3), "config-1.yaml",
		fmt.Sprintf("going on from step %d ", stopped), "Z step 1/", "Z done in ")
	contains(t, "config-1.yaml", content(t, dirs[0], "config-1.yaml"), fmt.Sprintf("steps: %d", endless))
}

// resumes returns the command that a stopped run prints.
func (s *started) resumes() string {
	s.t.Helper()
	_, command, ok := strings.Cut(s.said(), "to resume: ")
	if !ok {
		s.t.Fatalf("no command is named:\n%s", s.said())
	}
	command, _, _ = strings.Cut(command, "\n")
	return command
}

func TestResumeOnAnotherNumberOfRanks(t *testing.T) {
	t.Parallel()
	dir, _ := trains(t, "--nproc", "3", small(t, 4))
	must(t, "--nproc", "2", "--run-dir", dir, "--set", "train.steps=6", small(t, 4))
	if n := len(metricsOf(t, dir)); n != 6 {
		t.Errorf("%d lines of metrics, want 6", n)
	}
	_, stderr := must(t, "--run-dir", dir, "--set", "train.steps=6", small(t, 4))
	contains(t, "without steps left", stderr, "no steps were left; to go on, raise train.steps")
	// A checkpoint can also start a new run.
	other, _ := trains(t, "--resume", dir, "--set", "train.steps=7", small(t, 4))
	if got := metricsOf(t, other); len(got) != 1 || string(got[0]["step"]) != "7" {
		t.Errorf("going on from %s gave %v, want step 7 alone", dir, got)
	}
}

func TestInterruptTwiceEndsAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, filepath.Join(t.TempDir(), "run"), "--nproc", "2", small(t, endless))
	s.afterStep(1)
	workers := s.workers()
	// Stopped workers cannot write a checkpoint, so the first interrupt has no effect.
	signal(t, syscall.SIGSTOP, workers...)
	signal(t, syscall.SIGINT, s.Process.Pid)
	s.until("word of the first interrupt", func() bool {
		return strings.Contains(s.said(), "are asked for a checkpoint")
	})
	if !running(s.Process.Pid) {
		t.Fatal("the first interrupt ended the run")
	}
	// A copy of the signal within milliseconds would not count, so send it again until the launcher reports it.
	time.Sleep(50 * time.Millisecond)
	heard := func() bool { return strings.Contains(s.said(), "interrupted twice") }
	s.until("word of the second interrupt", func() bool {
		signal(t, syscall.SIGINT, s.Process.Pid)
		for end := time.Now().Add(2 * time.Second); !heard() && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
		return heard()
	})
	s.ends(130)
	gone(t, workers)
}

func TestRestartGoesOnFromTheCheckpoint(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	s := start(t, dir, "--nproc", "2", "--max-restarts", "1", "--set", "checkpoint.every=2", small(t, endless))
	s.afterStep(5)
	first := s.workers()
	signal(t, syscall.SIGKILL, first[0])
	gone(t, first)
	before := len(metricsOf(t, dir))
	s.until("steps after the restart", func() bool { return len(metricsOf(t, dir)) > before+1 })
	s.stop()
	for i, m := range metricsOf(t, dir) {
		if string(m["step"]) != fmt.Sprint(i+1) {
			t.Fatalf("line %d of metrics is step %s", i+1, m["step"])
		}
	}
}

func TestTwoJobsDoNotCollide(t *testing.T) {
	t.Parallel()
	config := small(t, 8)
	root := t.TempDir()
	a := start(t, filepath.Join(root, "a"), "--nproc", "2", config)
	b := start(t, filepath.Join(root, "b"), "--nproc", "2", config)
	if x, y := a.wait(), b.wait(); x != 0 || y != 0 {
		t.Fatalf("exit statuses %d and %d\n%s\n%s", x, y, a.said(), b.said())
	}
	alike(t, "two runs of one config", a.dir, b.dir)
}
