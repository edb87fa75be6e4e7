package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// SIGQUIT in the middle of a run prints the waits of each rank. The run continues to the same losses.
func TestQuitShowsTheRanksAndTheRunGoesOn(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	s := start(t, dir, "--nproc", "3", small(t, endless))
	s.afterStep(3)
	row := regexp.MustCompile(`(?m)^ +[012]  \S+ +\d+ +\d+  (forward|backward|optimizer|-) .* \d+\.\d$`)
	asked := 0
	s.until("table with a row of each rank", func() bool {
		// again, if a rank was too busy to answer
		if text := s.said(); strings.Count(text, "cprun: what each rank waits for") == asked {
			asked++
			signal(t, syscall.SIGQUIT, s.Process.Pid)
		}
		_, last, _ := strings.Cut(s.said(), "cprun: what each rank waits for")
		return len(row.FindAllString(last, -1)) >= 3
	})
	s.afterStep(len(metricsOf(t, dir)) + 3)
	s.stop()
	whole, _ := trains(t, "--nproc", "3", small(t, len(metricsOf(t, dir))))
	alike(t, "asked in the middle", dir, whole)
	if text := s.said(); strings.Contains(text, "goroutine ") {
		t.Errorf("stacks on the terminal:\n%s", text)
	}
	for rank := range 3 {
		contains(t, "the rank's log", content(t, dir, "logs", fmt.Sprintf("rank-%04d.log", rank)),
			fmt.Sprintf("--- stacks of rank %d, ", rank), "internal/run/train.")
	}
}

// If a rank is stopped for longer than the deadline, the others log their waits, and the table names the rank.
func TestATimeOutShowsWhoHeldUpWhom(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	s := start(t, dir, "--nproc", "3", "--set", "parallel.deadline=2s", small(t, endless))
	s.afterStep(3)
	workers := s.workers()
	victim := workers[len(workers)-1]
	rank := rankOf(t, victim)
	signal(t, syscall.SIGSTOP, victim)
	s.ends(1)
	gone(t, workers)
	text := s.said()
	for _, want := range []string{
		`(?m)^cprun: what each rank waited for$`,
		fmt.Sprintf(`(?m)^ +%d  \S+ +%d  .*  is stopped by a signal or a debugger( +-)*$`, rank, victim),
		fmt.Sprintf(`(?m)^cprun: rank %d holds up rank.*: it is stopped by a signal or a debugger$`, rank),
		`(?m)^ +\d  \S+ +\d+ +\d+  \w.*  \d+(, \d+)* +[\d,]+ +\d+\.\d$`,
	} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("stderr has no %s", want)
		}
	}
	for other := range 3 {
		// The reduction of metrics belongs to no pass: "step 6: all-reduce".
		want := fmt.Sprintf(`(?m)^cprun worker: rank %d, step \d+[,:] .* s without progress; `+
			`[\d,]+ bytes (from|to) rank \d`, other)
		log := content(t, dir, "logs", fmt.Sprintf("rank-%04d.log", other))
		if other != rank && !regexp.MustCompile(want).MatchString(log) {
			t.Errorf("log of rank %d has no %s", other, want)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}
