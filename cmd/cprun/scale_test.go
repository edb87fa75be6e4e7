package main

import (
	"encoding/csv"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/lab/experiment"
)

// kinds is an experiment with a cell of each kind: two succeed, one fails on rank 0, one is out of memory, one times
// out, one is refused.
const kinds = `
base: %s
grid:
  data.seq_len: [64, 128]
  train.steps: [4, 1000000]
  model.vocab_size: [256, 1G]
  optimizer.lr: [0.001, 3.0e+20]     # the latter diverges
  parallel.context: [2, 3]
skip:
  - {data.seq_len: 64, train.steps: 1000000}
  - {data.seq_len: 64, model.vocab_size: 1G}
  - {data.seq_len: 64, optimizer.lr: 3.0e+20}
  - {data.seq_len: 64, parallel.context: 3}
  - {train.steps: 1000000, model.vocab_size: 1G}
  - {train.steps: 1000000, optimizer.lr: 3.0e+20}
  - {train.steps: 1000000, parallel.context: 3}
  - {model.vocab_size: 1G, optimizer.lr: 3.0e+20}
  - {model.vocab_size: 1G, parallel.context: 3}
  - {optimizer.lr: 3.0e+20, parallel.context: 3}
warmup: 1
limit: 4s
`

// experimentFile writes an experiment over a small config.
func experimentFile(t *testing.T, text string) string {
	t.Helper()
	return write(t, t.TempDir(), "grid.yaml", fmt.Sprintf(text, small(t, 4)))
}

// table reads results.csv, with "some" for figures that vary between runs.
func table(t *testing.T, dir string) [][]string {
	t.Helper()
	rows, err := csv.NewReader(strings.NewReader(content(t, dir, "results.csv"))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	measured := []string{
		"tokens_per_second", "tokens_per_second_per_device", "tflops_per_device", "step_seconds", "step_seconds_min",
		"step_seconds_max", "memory_bytes", "comm_wait_seconds", "predicted_step_seconds",
	}
	for _, row := range rows[1:] {
		for i, name := range rows[0] {
			if !slices.Contains(measured, name) || row[i] == "" {
				continue
			}
			if x, err := strconv.ParseFloat(row[i], 64); err != nil || x < 0 || strings.ContainsAny(row[i], "eE") {
				t.Errorf("%s is %q", name, row[i])
			}
			row[i] = "some"
		}
	}
	return rows
}

// without drops the reasons of a table, which contain pids.
func without(rows [][]string) (lines []string) {
	for _, row := range rows {
		lines = append(lines, strings.Join(row[:len(row)-1], ","))
	}
	return lines
}

// An experiment that was killed and resumed has every cell; in the long form, also as one that was not disturbed.
func TestScale(t *testing.T) {
	t.Parallel()
	file := experimentFile(t, kinds)
	dir := filepath.Join(t.TempDir(), "out")
	interrupt(t, dir, file)
	stdout := frozen(t, dir, file)
	rows := table(t, dir)
	if !testing.Short() {
		whole := filepath.Join(t.TempDir(), "out")
		must(t, "scale", "--nproc", "2", "--out", whole, file)
		if got, want := without(rows), without(table(t, whole)); !slices.Equal(got, want) {
			t.Errorf("killed and resumed:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	got := map[string]string{} // status by cell
	reason := map[string]string{}
	for _, row := range rows[1:] {
		key := strings.Join(row[:5], " ")
		got[key], reason[key] = row[8], row[len(row)-1]
		if row[8] == "ok" && slices.Contains(append(slices.Clone(row[9:12]), row[13:]...), "") &&
			row[len(row)-1] != "" {
			t.Errorf("a figure is missing: %v", row)
		}
		if ran := strings.Join(row[5:8], " "); ran != "flash zigzag none" && row[8] != "refused" {
			t.Errorf("%s: backend, layout and recompute are %q", key, ran)
		}
	}
	for key, want := range map[string][2]string{
		"64 4 256 0.001 2":                  {"ok", ""},
		"128 4 256 0.001 2":                 {"ok", ""},
		"128 1000000 256 0.001 2":           {"timeout", "limit of 4s"},
		"128 4 1073741824 0.001 2":          {"out_of_memory", "does NOT fit"},
		"128 4 256 300000000000000000000 2": {"failed", "training diverged"},
		"128 4 256 0.001 3":                 {"refused", "grid.yaml:8: parallel.context"},
	} {
		if got[key] != want[0] || !strings.Contains(reason[key], want[1]) {
			t.Errorf("%s: %q, %q; want %q", key, got[key], reason[key], want)
		}
	}
	if len(rows) != 7 {
		t.Errorf("%d lines, want 7: %v", len(rows), rows)
	}
	contains(t, "the table", stdout, "data.seq_len", "recompute", "backend", "layout", "step s", "timeout",
		"out_of_memory: this run does NOT fit")
	if saved, _ := filepath.Glob(filepath.Join(dir, "cells", "*", "*", "checkpoints", "step-*")); len(saved) > 0 {
		t.Errorf("cells wrote checkpoints: %v", saved)
	}
	f, err := os.Open(filepath.Join(dir, "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if r, err := experiment.Decode(f); err != nil || r.Name != "grid" || r.Device != "cpu" || len(r.Cells) != 32 ||
		r.Cells[0].Memory == nil || r.Cells[0].PlannedMemoryBytes != r.Cells[0].Memory.Total() {
		t.Errorf("results.json: %+v, %v", r, err)
	}

	// All cells are done, so none runs again. Another experiment is refused.
	log := content(t, dir, "cells.jsonl")
	must(t, "scale", "--nproc", "2", "--out", dir, file)
	if content(t, dir, "cells.jsonl") != log {
		t.Error("an experiment that was done was run again")
	}
	// Runs of a version that did not record its choices count.
	older := strings.ReplaceAll(log, `"backend":"flash","layout":"zigzag","recompute":"none",`, "")
	if write(t, dir, "cells.jsonl", older); older == log {
		t.Fatal("cells.jsonl does not say what ran")
	}
	must(t, "scale", "--nproc", "2", "--out", dir, file)
	for i, row := range table(t, dir) {
		if i > 0 && strings.Join(row[5:8], "") != "" || row[8] != rows[i][8] {
			t.Errorf("of an older version: %v", row)
		}
	}
	invalid(t, []string{"scale", "--nproc", "2", "--set", "train.seed=2", "--out", dir, file}, "differs in the cells' configs")
}

// cell waits until the endless cell in a directory runs, and returns the pids of its launcher and workers.
func (s *started) cell(dir string) (pids []int) {
	s.t.Helper()
	s.until("the endless cell", func() bool {
		runs, _ := filepath.Glob(filepath.Join(dir, "cells", "*1000000*", "1", "metrics.jsonl"))
		if pids = s.workers(); len(runs) == 1 && len(pids) == 1 {
			pids = append(pids, children(s.t, pids[0])...)
		}
		return len(pids) == 3
	})
	return pids
}

// interrupt kills an experiment in the middle and tears the last line of its file.
func interrupt(t *testing.T, dir, file string) {
	s := launched(t, process(t, "scale", "--nproc", "2", "--out", dir, file))
	pids := s.cell(dir)
	signal(t, syscall.SIGKILL, s.Process.Pid)
	s.wait()
	gone(t, pids)
	write(t, dir, "cells.jsonl", content(t, dir, "cells.jsonl")+`{"cell":"torn`)
}

// frozen runs an experiment, and stops the workers of the endless cell up to its limit, which spares the cores. It
// returns the table.
func frozen(t *testing.T, dir, file string) (stdout string) {
	c := process(t, "scale", "--nproc", "2", "--out", dir, file)
	var out strings.Builder
	c.Stdout = &out
	s := launched(t, c)
	workers := s.cell(dir)[1:]
	signal(t, syscall.SIGSTOP, workers...)
	s.until("the limit", func() bool {
		logs, _ := filepath.Glob(filepath.Join(dir, "cells", "*1000000*", "1", "logs", "launcher.log"))
		return len(logs) == 1 && strings.Contains(content(t, logs[0]), "are asked for a checkpoint")
	})
	signal(t, syscall.SIGCONT, workers...)
	s.ends(0)
	return out.String()
}

// Ctrl-C ends the running cell, keeps the finished ones, and prints a command that resumes.
func TestScaleStopsAndGoesOn(t *testing.T) {
	t.Parallel()
	file := experimentFile(t, "base: %s\ngrid: {train.steps: [4, 1000000]}\nwarmup: 0\nlimit: 1m\n")
	work := t.TempDir()
	run := func(c *exec.Cmd) *started {
		c.Dir = work
		return launched(t, c)
	}
	s := run(process(t, "scale", "--nproc", "2", file))
	pids := s.cell(filepath.Join(work, "runs", "*"))
	signal(t, syscall.SIGINT, s.Process.Pid)
	s.ends(75)
	gone(t, pids)
	again := s.resumes()
	dirs, _ := filepath.Glob(filepath.Join(work, "runs", "*"))
	if len(dirs) != 1 {
		t.Fatalf("directories %v", dirs)
	}
	if rows := without(table(t, dirs[0])); !strings.HasPrefix(rows[1], "4,flash,zigzag,none,ok,some") ||
		!strings.HasPrefix(rows[2], "1000000,flash,zigzag,none,pending,,") {
		t.Errorf("the results so far:\n%s", strings.Join(rows, "\n"))
	}
	if left, _ := filepath.Glob(filepath.Join(dirs[0], "cells", "2-*", "1")); len(left) > 0 {
		t.Errorf("the run that was stopped is there: %v", left)
	}
	// The printed command, and the same command, resume with the second cell.
	c := exec.Command("sh", "-c", "exec "+again)
	c.Env = s.Env
	s = run(c)
	s.cell(dirs[0])
	if s.stop(); strings.Contains(s.said(), "cell 1 of 2") {
		t.Errorf("%s\n%s", again, s.said())
	}
	// Stopped workers do not end on the first request. The second one does not wait for them.
	s = run(process(t, "scale", "--nproc", "2", file))
	pids = s.cell(dirs[0])
	signal(t, syscall.SIGSTOP, pids[1:]...)
	signal(t, syscall.SIGINT, s.Process.Pid)
	s.until("word of the first request", func() bool { return strings.Contains(s.said(), "a second request") })
	time.Sleep(200 * time.Millisecond) // longer than the time in which signals count as one
	signal(t, syscall.SIGINT, s.Process.Pid)
	s.ends(130)
	gone(t, pids)
	if dirs, _ := filepath.Glob(filepath.Join(work, "runs", "*")); len(dirs) != 1 {
		t.Errorf("the same command made another directory: %v", dirs)
	}
}

func TestScalePlansWithoutRunning(t *testing.T) {
	t.Parallel()
	file := experimentFile(t, "base: %s\ngrid: {data.seq_len: [200, 400], nproc: [4, 8], model.vocab_size: [256, "+
		"1G], parallel.context: [auto, 5]}\n"+
		"set: {train.steps: 9}\nskip: [{model.vocab_size: 1G, parallel.context: 5}]\n")
	dir := filepath.Join(t.TempDir(), "out")
	must(t, "scale", "--plan", "--assume", "arch=sm90,cudnn=9.10.2,memory=80G,link=450G", "--out", dir, file)
	count := map[string]int{}
	for _, row := range table(t, dir)[1:] {
		status := row[7] // after the grid's keys, backend, layout and recompute
		count[status]++
		if planned := status == "planned"; planned != (row[len(row)-2] == "some") && status != "out_of_memory" ||
			planned && row[len(row)-4] == "" {
			t.Errorf("a plan without figures, or figures without one: %v", row)
		}
	}
	if count["planned"] != 4 || count["out_of_memory"] != 4 || count["refused"] != 4 || len(count) != 3 {
		t.Errorf("statuses %v", count)
	}
	if runs, _ := filepath.Glob(filepath.Join(dir, "cells*")); len(runs) > 0 {
		t.Errorf("a plan made %v", runs)
	}
}

// cprun scale can plan the example experiments.
func TestExamplesOfScale(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{"lengths": nil, "h200": {"--assume",
		"arch=sm90,cudnn=9.19.0,memory=140G,link=450G"}, "long": {"--assume", "gpu=h200,gpus=2,cudnn=9.19.0"}} {
		if testing.Short() && name == "long" {
			continue
		}
		dir := filepath.Join(t.TempDir(), name)
		must(t, append([]string{"scale", "--plan", "--out", dir, "../../examples/scale/" + name + ".yaml"},
			flags...)...)
		for _, row := range table(t, dir)[1:] {
			if !slices.Contains(row, "planned") {
				t.Errorf("%s: %v", name, row)
			}
		}
	}
}

func TestScaleRefuses(t *testing.T) {
	t.Parallel()
	good := experimentFile(t, "base: %s\ngrid: {nproc: [1]}\nwarmup: 0\n")
	for _, c := range []struct{ text, flags, want string }{
		{"base: %s\ngrid: {data.seq_lem: [1]}\n", "",
			"grid.yaml:2: data.seq_lem: unknown key; did you mean data.seq_len?"},
		{"base: %s\ngrid: {data.seq_len: [1M, 2M]}\n", "", "make no sample"},
		{"base: %s\ngrid: {parallel.context: [3, 5]}\n", "",
			"grid.yaml:2: parallel.context: 5 does not divide the number of ranks, 1"},
		{"base: %s\ngrid: {nproc: [100000]}\n", "", "at most"},
		{"base: %s\ngrid: {nnodes: [2]}\n", "", "--slurm"},
		{"base: %s\ngrid: {nproc: [1]}\nwarmup: 4\n", "",
			"grid.yaml:3: warmup: 4 "},
		{"base: %s\ngrid: {nproc: [1]}\nskip: [{nproc: 1}]\nwarmup: 0\n", "", ": skip: "},
		{"", "--set nproc=1", "--set nproc=1: the grid"},
		{"", "--set train.stepz=1", "train.steps"},
		{"", "--assume arch=sm90", "--plan"},
		{"", "--resume now", "want auto or never"},
		{"", "--device tpu", "auto, cpu or cuda"},
		{"", "--nproc many", "--nproc"},
		{"", "--plan --slurm", "--slurm"},
	} {
		file, dir := good, filepath.Join(t.TempDir(), "out")
		if c.text != "" {
			file = experimentFile(t, c.text)
		}
		invalid(t, append([]string{"scale", "--out", dir, file}, strings.Fields(c.flags)...), c.want)
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%q %s: the directory was made", c.text, c.flags)
		}
	}
	invalid(t, []string{"scale", filepath.Join(t.TempDir(), "none.yaml")}, "none.yaml")
}
