package main

import (
	"encoding/json"
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
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.NewReplacer("steps: 1,", "epochs: 1, early_stop: {patience: 1},", "lr_schedule: {name: constant}",
		"lr_schedule: {warmup_ratio: 0.5}\ncheckpoint: {best: true}", "seq_len: 200}", "seq_len: 200, validation: {path: "+path+", every: 1}}").Replace(string(text))
	if err := os.WriteFile(path, []byte(changed), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// Every benchmark prints a table and writes JSON to a file.
func TestBenchmarksEndToEnd(t *testing.T) {
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
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			report := filepath.Join(dir, "r.json")
			stdout, progress := must(t, append([]string{"bench", name, "--json", report}, c.args...)...)
			if strings.Contains(progress, " 0.0 ") || strings.Contains(progress, "run directory") ||
				strings.Contains(progress, os.TempDir()+"/cprun-bench-") {
				t.Errorf("it says while it measures:\n%s", progress)
			}
			for _, w := range c.want {
				if !strings.Contains(stdout, w) {
					t.Errorf("the table does not say %q:\n%s", w, stdout)
				}
			}
			text, err := os.ReadFile(report)
			if err != nil {
				t.Fatal(err)
			}
			var r bench.Report
			if err := json.Unmarshal(text, &r); err != nil {
				t.Fatal(err)
			}
			if r.Bench != name || r.Ranks != 2 || r.Rows() != c.rows || r.Machine.Device == "" || r.Version == "" ||
				len(r.Command) == 0 {
				t.Errorf("report with %d rows, want %d:\n%s", r.Rows(), c.rows, text)
			}
		})
	}
}

// A measurement leaves no checkpoint and no directory.
func TestBenchTrainLeavesNothing(t *testing.T) {
	tmp := t.TempDir()
	c := process(t, "bench", "train", "--steps", "1", "--warmup", "1", "--data", "config", "--json", "-", "--quiet",
		small(t, 1))
	c.Env = append(c.Env, "TMPDIR="+tmp)
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	var r bench.Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	if t0 := r.Train; t0 == nil || !(t0.StepSeconds > 0) || t0.Planned == 0 || !(t0.Predicted > 0) ||
		!(t0.FirstStep > 0) || t0.Data != "config" {
		t.Errorf("%s", out)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestBenchHelpHasAnExampleEverywhere(t *testing.T) {
	for _, name := range []string{"", "attention", "comm", "train", "ops", "calibrate"} {
		args := strings.Fields("bench " + name + " -h")
		if stdout, _ := must(t, args...); !strings.Contains(stdout, "Examples:") {
			t.Errorf("cprun %v has no example:\n%s", args, stdout)
		}
	}
}

func TestBenchmarksCheckTheirFlags(t *testing.T) {
	good := small(t, 1)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"bench"}, "attention, comm, train, ops or calibrate"},
		{[]string{"bench", "kernels"}, `"kernels"`},
		{[]string{"bench", "attention", "--seq", "32k"}, "32K"},
		{[]string{"bench", "attention", "--heads", "5", "--kv-heads", "2"}, "--heads"},
		{[]string{"bench", "attention", "--json", "/no/such/dir/x"}, "--json"},
		{[]string{"bench", "attention", "--layout", "document"}, "zigzag, striped, contiguous or window"},
		{[]string{"bench", "attention", "--documents", "none.json"}, "--documents"},
		{[]string{"bench", "comm"}, "--nproc 1"},
		{[]string{"bench", "comm", "--nproc", "2", "--calls", "gossip"}, "gossip"},
		{[]string{"bench", "train"}, "a config"},
		{[]string{"bench", "train", "--data", "web", good}, "--data"},
		{[]string{"bench", "train", "--steps", "0", good}, "--steps"},
		{[]string{"bench", "train", "none.yaml"}, "none.yaml"},
	} {
		code, _, stderr := cprun(t, c.args...)
		if code != 2 || !strings.Contains(stderr, c.want) {
			t.Errorf("cprun %v: exit status %d, want 2 and %q:\n%s", c.args, code, c.want, stderr)
		}
	}
}

// A refused measurement leaves no files.
func TestBenchTrainCleansUp(t *testing.T) {
	dir := t.TempDir()
	code, _, stderr := with(t, []string{"TMPDIR=" + dir}, "bench", "train", "--data", "config", "--set",
		"data.path=none.txt", small(t, 1))
	left, err := os.ReadDir(dir)
	if code != 2 || err != nil || len(left) > 0 {
		t.Errorf("exit status %d, want 2; left %v (%v)\n%s", code, left, err, stderr)
	}
}
