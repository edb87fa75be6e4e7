package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/run/bench"
)

// validated returns a config with epochs, a warmup ratio, validations and an early stop. They are off in benchmarks.
func validated(t *testing.T) string {
	t.Helper()
	path := small(t, 1)
	changed := strings.NewReplacer("steps: 1,", "epochs: 1, early_stop: {patience: 1},", "lr_schedule: {name: constant}",
		"lr_schedule: {warmup_ratio: 0.5}\ncheckpoint: {best: true}", "seq_len: 200}",
		"seq_len: 200, validation: {path: "+path+", every: 1}}").Replace(content(t, path))
	return write(t, filepath.Dir(path), "train.yaml", changed)
}

// Every benchmark prints a table and writes JSON to a file.
func TestBenchmarksEndToEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		want []string // in the table
		rows int
	}{
		"attention": {[]string{"--nproc", "2", "--seq", "64,128", "--iters", "1", "--algorithm", "ring,ulysses"},
			[]string{"causal", "4:2 heads of 32", "ulysses", "heads for rows", "hop 0", "gradients home"}, 4},
		"comm": {[]string{"--nproc", "2", "--sizes", "4K", "--iters", "2"},
			[]string{"unix", "tcp", "exchange", "all_reduce"}, 8},
		"train": {[]string{"--nproc", "2", "--steps", "2", "--warmup", "1", validated(t)},
			[]string{"train.yaml", "S=200", "random tokens", "planned"}, 3},
	} {
		report := filepath.Join(t.TempDir(), "r.json")
		stdout, progress := must(t, append([]string{"bench", name, "--json", report}, c.args...)...)
		if strings.Contains(progress, " 0.0 ") || strings.Contains(progress, "run directory") ||
			strings.Contains(progress, os.TempDir()+"/cprun-bench-") {
			t.Errorf("%s says while it measures:\n%s", name, progress)
		}
		contains(t, "the table of "+name, stdout, c.want...)
		var r bench.Report
		decode(t, content(t, report), &r)
		if r.Bench != name || r.Ranks != 2 || r.Rows() != c.rows || r.Machine.Device == "" || r.Version == "" ||
			len(r.Command) == 0 {
			t.Errorf("%s: a report with %d rows, want %d:\n%s", name, r.Rows(), c.rows, content(t, report))
		}
	}
}

// A measurement leaves no checkpoint and no directory.
func TestBenchTrainLeavesNothing(t *testing.T) {
	t.Parallel()
	tmp := t.TempDir()
	c := process(t, "bench", "train", "--steps", "1", "--warmup", "1", "--data", "config", "--json", "-", "--quiet",
		small(t, 1))
	c.Env = append(c.Env, "TMPDIR="+tmp)
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	var r bench.Report
	decode(t, string(out), &r)
	if t0 := r.Train; t0 == nil || !(t0.StepSeconds > 0) || t0.Planned == 0 || !(t0.Predicted > 0) ||
		!(t0.FirstStep > 0) || t0.Data != "config" {
		t.Errorf("%s", out)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestBenchmarksCheckTheirFlags(t *testing.T) {
	t.Parallel()
	good := small(t, 1)
	for args, want := range map[string]string{
		"":                                 "attention, comm, train, ops or calibrate",
		"kernels":                          `"kernels"`,
		"attention --seq 32k":              "32K",
		"attention --heads 5 --kv-heads 2": "--heads",
		"attention --json /no/such/dir/x":  "--json",
		"attention --layout document":      "zigzag, striped, contiguous or window",
		"attention --documents none.json":  "--documents",
		"comm":                             "--nproc 1",
		"comm --nproc 2 --calls gossip":    "gossip",
		"train":                            "a config",
		"train --data web " + good:         "--data",
		"train --steps 0 " + good:          "--steps",
		"train none.yaml":                  "none.yaml",
	} {
		invalid(t, strings.Fields("bench "+args), want)
	}
}

// A refused measurement leaves no files.
func TestBenchTrainCleansUp(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	code, _, stderr := with(t, []string{"TMPDIR=" + dir}, "bench", "train", "--data", "config", "--set",
		"data.path=none.txt", small(t, 1))
	left, err := os.ReadDir(dir)
	if code != 2 || err != nil || len(left) > 0 {
		t.Errorf("exit status %d, want 2; left %v (%v)\n%s", code, left, err, stderr)
	}
}
