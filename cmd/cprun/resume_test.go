package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// trained returns a config, and the directory of its run with checkpoints of steps 2 and 4.
func trained(t *testing.T) (config, dir string) {
	t.Helper()
	config, dir = small(t, 4), filepath.Join(t.TempDir(), "run")
	must(t, "--nproc", "2", "--run-dir", dir, "--set", "checkpoint.every=2", config)
	return config, dir
}

// damage truncates a shard of the checkpoint of a step.
func damage(t *testing.T, dir string, step int) {
	t.Helper()
	if err := os.Truncate(filepath.Join(dir, "checkpoints", fmt.Sprintf("step-%08d", step),
		"shard-00000-of-00002.safetensors"), 10); err != nil {
		t.Fatal(err)
	}
}

// refused runs cprun, which must report the fault without starting anything or changing the run.
func refused(t *testing.T, dir string, want []string, args ...string) {
	t.Helper()
	state := func() string {
		var b strings.Builder
		for _, name := range []string{"config.yaml", "plan.json", "metrics.jsonl"} {
			text, err := os.ReadFile(filepath.Join(dir, name))
			fmt.Fprintln(&b, string(text), err)
		}
		left, err := os.ReadDir(filepath.Join(dir, "checkpoints"))
		fmt.Fprintln(&b, left, err)
		return b.String()
	}
	before := state()
	code, _, stderr := cprun(t, args...)
	if code != 2 {
		t.Errorf("cprun %q: exit status %d, want 2\n%s", args, code, stderr)
	}
	for _, w := range want {
		if !strings.Contains(stderr, w) {
			t.Errorf("cprun %q: stderr does not say %q:\n%s", args, w, stderr)
		}
	}
	if after := state(); after != before {
		t.Errorf("cprun %q changed the run from\n%s\nto\n%s", args, before, after)
	}
}

func TestDamagedCheckpointsAreNotReplaced(t *testing.T) {
	config, dir := trained(t)
	damage(t, dir, 4)
	refused(t, dir, []string{"step-00000004", "not whole"}, "--run-dir", filepath.Join(t.TempDir(), "new"), "--resume",
		filepath.Join(dir, "checkpoints", "step-00000004"), config)

	// With an older complete checkpoint, train and export use that and report it.
	stdout, _ := must(t, "export", dir, "--to", filepath.Join(t.TempDir(), "hf"))
	_, stderr := must(t, "--run-dir", filepath.Join(t.TempDir(), "new"), "--resume", dir, config)
	for what, text := range map[string]string{"export": stdout, "train": stderr} {
		if !strings.Contains(text, "checkpoint skipped:") || !strings.Contains(text, "step-00000004") ||
			!strings.Contains(text, "step 2") {
			t.Errorf("%s does not say that it is of step 2:\n%s", what, text)
		}
	}
	damage(t, dir, 2)
	refused(t, dir, []string{"all of them damaged", "step-00000002", "step-00000004", "another --run-dir"}, "--run-dir",
		dir, config)
}

func TestCheckpointsThatCannotBeReadAreRefused(t *testing.T) {
	config, dir := trained(t)
	manifest := filepath.Join(dir, "checkpoints", "step-00000004", "manifest.json")
	text, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(manifest, []byte(strings.Replace(string(text), `"version": 2`, `"version": 7`, 1)),
		0o666); err != nil {
		t.Fatal(err)
	}
	refused(t, dir, []string{"version 7", "another --run-dir"}, "--run-dir", dir, config)

	file := t.TempDir()
	if err := os.WriteFile(filepath.Join(file, "checkpoints"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	refused(t, file, []string{"not a directory", "another --run-dir"}, "--run-dir", file, config)
}

// These models have equal weight shapes.
func TestOtherModelKeysAreRefusedAndOtherDataTold(t *testing.T) {
	config, dir := trained(t)
	for key, value := range map[string]string{"num_attention_heads": "8", "rope_theta": "500000.0",
		"sliding_window": "16", "rms_norm_eps": "1.0e-5"} {
		set := []string{"--set", "model." + key + "=" + value}
		if key == "num_attention_heads" {
			set = append(set, "--set", "model.num_key_value_heads=4", "--set", "model.head_dim=4")
		}
		refused(t, dir, []string{"of another model", "model." + key}, append(set, "--run-dir", dir, config)...)
	}
	changed := []string{"--run-dir", dir, "--set", "data.seq_len=100", "--set", "data.seed=2", "--set", "data.train_on=all"}
	_, stderr := must(t, append(changed, "--set", "train.steps=5", config)...)
	for _, w := range []string{"data.seq_len is 200 in the checkpoint and 100 here", "data.seed", "data.train_on is",
		"sample 4"} {
		if !strings.Contains(stderr, w) {
			t.Errorf("stderr does not say %q:\n%s", w, stderr)
		}
	}
	// Equal data and harmless changes cause no message.
	_, stderr = must(t, append(changed, "--set", "train.steps=6", "--set", "optimizer.lr=1.0e-4", config)...)
	if strings.Contains(stderr, "warning") {
		t.Errorf("the same data are warned of:\n%s", stderr)
	}
}

// More steps raise the learning rate of a finished schedule.
func TestAJumpOfTheLearningRateIsTold(t *testing.T) {
	config, dir := small(t, 4), filepath.Join(t.TempDir(), "run")
	must(t, "--run-dir", dir, "--set", "lr_schedule.name=linear", config)
	_, stderr := must(t, "--run-dir", dir, "--set", "lr_schedule.name=linear", "--set", "train.steps=8", config)
	n := strings.Count(stderr, "learning rate of step 5 is 0.00055")
	if n != 1 || !strings.Contains(stderr, "train.steps 4 -> 8") {
		t.Errorf("it is told %d times, want once:\n%s", n, stderr)
	}
	_, stderr = must(t, "--run-dir", dir, "--set", "lr_schedule.name=linear", "--set", "train.steps=8",
		"--set", "log.every=2", config)
	if strings.Contains(stderr, "learning rate of step") {
		t.Errorf("a rate that stays is told of:\n%s", stderr)
	}
}

// Without data.seed in the config, the run keeps the checkpoint's order of samples.
func TestTheOrderOfACheckpointGoesOn(t *testing.T) {
	set := func(seed string, more ...string) []string {
		return append([]string{"--set", "data.seq_len=16", "--set", "model.num_hidden_layers=1", "--set", seed},
			more...)
	}
	config := small(t, 4)
	whole, parts := filepath.Join(t.TempDir(), "whole"), filepath.Join(t.TempDir(), "parts")
	must(t, set("data.seed=5", "--run-dir", whole, config)...)
	must(t, set("data.seed=5", "--run-dir", parts, "--set", "train.steps=2", config)...)
	_, stderr := must(t, set("train.seed=9", "--run-dir", parts, config)...)
	if strings.Contains(stderr, "data.seed") {
		t.Errorf("another order is told of:\n%s", stderr)
	}
	want, got := metricsOf(t, whole), metricsOf(t, parts)
	for i := range want {
		if len(got) != len(want) || string(got[i]["loss"]) != string(want[i]["loss"]) {
			t.Fatalf("step %d: loss %s, want %s", i+1, got[i]["loss"], want[i]["loss"])
		}
	}
	_, stderr = must(t, set("data.seed=6", "--run-dir", parts, "--set", "train.steps=5", config)...)
	if !strings.Contains(stderr, "data.seed is 5 in the checkpoint and 6 here") {
		t.Errorf("another order is not told of:\n%s", stderr)
	}
}

// Another spelling of the same model is accepted.
func TestEqualModelsAreNotRefused(t *testing.T) {
	config, dir := trained(t)
	for i, set := range []string{"model.layer_types=[full_attention, full_attention]",
		"model.rope_scaling={rope_type: linear, factor: 1}"} {
		must(t, "--run-dir", dir, "--set", set, "--set", fmt.Sprintf("train.steps=%d", 5+i), config)
	}
}

// The same command resumes after the checkpoint of --resume is gone.
func TestNamedCheckpointIsNeededOnce(t *testing.T) {
	config, dir := trained(t)
	from := filepath.Join(dir, "checkpoints", "step-00000002")
	other := filepath.Join(t.TempDir(), "other")
	args := []string{"--run-dir", other, "--resume", from, config}
	must(t, args...)
	if err := os.RemoveAll(from); err != nil {
		t.Fatal(err)
	}
	_, stderr := must(t, append([]string{"--set", "train.steps=6"}, args...)...)
	if !strings.Contains(stderr, "going on from step 4 of "+other) {
		t.Errorf("it did not go on from its own checkpoint:\n%s", stderr)
	}
	if !strings.Contains(stderr, "--resume "+from+" ignored") || !strings.Contains(stderr, "step-00000004") {
		t.Errorf("--resume is not reported as ignored:\n%s", stderr)
	}
	own := filepath.Join(other, "checkpoints", "step-00000004")
	for path, want := range map[string]bool{other: false, filepath.Dir(own): false, own: true} {
		_, stderr := must(t, "--run-dir", other, "--set", "train.steps=7", "--resume", path, "--dry-run", config)
		if got := strings.Contains(stderr, " ignored"); got != want {
			t.Errorf("--resume %s reported as ignored: %t\n%s", path, got, stderr)
		}
	}
}

func TestASecondRunInTheDirectoryIsRefused(t *testing.T) {
	s := start(t, filepath.Join(t.TempDir(), "run"), small(t, endless))
	s.afterStep(1)
	before, err := os.ReadFile(filepath.Join(s.dir, "config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	code, _, stderr := cprun(t, "--run-dir", s.dir, "--nproc", "2", small(t, 3))
	if code != 2 || !strings.Contains(stderr, "locked by another process") {
		t.Errorf("exit status %d, want 2:\n%s", code, stderr)
	}
	if after, err := os.ReadFile(filepath.Join(s.dir, "config.yaml")); err != nil || string(after) != string(before) {
		t.Errorf("config.yaml was replaced (%v)", err)
	}
	signal(t, s.Process.Pid, syscall.SIGTERM)
	if code := s.wait(); code != 75 {
		t.Errorf("the first run: exit status %d, want 75\n%s", code, s.said())
	}
}

// The text is a line and a sparse terabyte. The search for document ends keeps the input check running as long as the
// test needs.
func TestSignalsWhileInputIsChecked(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text.txt")
	if err := errors.Join(os.WriteFile(text, bytes.Repeat([]byte("a"), 1<<10), 0o600),
		os.Truncate(text, 1<<40)); err != nil {
		t.Fatal(err)
	}
	for _, sig := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGTERM, syscall.SIGINT} {
		s := start(t, filepath.Join(t.TempDir(), "run"), "--set", "data.path="+text, "--set",
			"data.pack_documents=true", "--set", "data.eos_token_id=1", small(t, 1))
		s.until("the text is read", func() bool { return opened(s.Process.Pid, text) })
		signal(t, s.Process.Pid, sig)
		if code := s.wait(); code != 75 || !strings.Contains(s.said(), "before training began") {
			t.Errorf("%v: exit status %d, want 75\n%s", sig, code, s.said())
		}
	}
}

// opened reports whether a process has a file open.
func opened(pid int, path string) bool {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == path {
			return true
		}
	}
	return false
}

// Epochs become steps, in plans too, and a resume takes up more of them. Without data they stay.
func TestEpochs(t *testing.T) {
	run := filepath.Join(t.TempDir(), "run")
	base := small(t, 1)
	text := filepath.Join(t.TempDir(), "a.txt")
	if err := os.WriteFile(text, bytes.Repeat([]byte("a"), 5*8+1), 0o666); err != nil {
		t.Fatal(err)
	}
	of := func(epochs, path string) []string {
		return []string{"--set", "train={epochs: " + epochs + ", global_batch_size: 2}", "--set", "data.path=" + path,
			"--set", "data.seq_len=8", "--set", "lr_schedule={warmup_ratio: 0.5}", base}
	}
	for epochs, want := range map[string][]string{"1": {"steps: 3\n", "epochs: null\n", "warmup_steps: 2\n"},
		"2": {"steps: 5\n", "samples: 10\n", "epochs: null\n", "warmup_steps: 3\n"}} {
		stdout, _ := must(t, append([]string{"plan", "--verbose"}, of(epochs, text)...)...)
		for _, line := range want {
			if !strings.Contains(stdout, " "+line) {
				t.Errorf("the plan of %s epochs has no %q:\n%s", epochs, line, stdout)
			}
		}
	}
	stdout, _ := must(t, append([]string{"plan", "--verbose", "--assume", "gpus=1,arch=sm90"}, of("2", "/no/x.txt")...)...)
	if !strings.Contains(stdout, " steps: null\n") || !strings.Contains(stdout, " warmup_ratio: 0.5\n") {
		t.Errorf("the plan without data:\n%s", stdout)
	}
	grid := filepath.Join(t.TempDir(), "grid.yaml")
	yaml := fmt.Sprintf("base: %s\nset: {train.epochs: 1}\ngrid: {data.seq_len: [100, 200]}\nwarmup: 1\n", base)
	if err := os.WriteFile(grid, []byte(yaml), 0o666); err != nil {
		t.Fatal(err)
	}
	must(t, "scale", grid, "--plan", "--out", filepath.Join(t.TempDir(), "scale"))
	must(t, append([]string{"--run-dir", run}, of("1", text)...)...)
	must(t, append([]string{"--run-dir", run}, of("2", text)...)...)
	metrics, err := os.ReadFile(filepath.Join(run, "metrics.jsonl"))
	if n := bytes.Count(metrics, []byte("\n")); err != nil || n != 6 || !bytes.Contains(metrics, []byte(`"epoch":2,`)) {
		t.Errorf("%d lines of metrics, %v, want 6:\n%s", n, err, metrics)
	}
}
