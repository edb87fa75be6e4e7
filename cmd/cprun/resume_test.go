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
	config = small(t, 4)
	dir, _ = trains(t, "--nproc", "2", "--set", "checkpoint.every=2", config)
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
	invalid(t, args, want...)
	if after := state(); after != before {
		t.Errorf("cprun %q changed the run from\n%s\nto\n%s", args, before, after)
	}
}

func TestDamagedCheckpointsAreNotReplaced(t *testing.T) {
	t.Parallel()
	config, dir := trained(t)
	damage(t, dir, 4)
	refused(t, dir, []string{"step-00000004", "not whole"}, "--run-dir", filepath.Join(t.TempDir(), "new"), "--resume",
		filepath.Join(dir, "checkpoints", "step-00000004"), config)

	// With an older complete checkpoint, train and export use that and report it.
	stdout, _ := must(t, "export", dir, "--to", filepath.Join(t.TempDir(), "hf"))
	_, stderr := must(t, "--run-dir", filepath.Join(t.TempDir(), "new"), "--resume", dir, config)
	for what, text := range map[string]string{"export": stdout, "train": stderr} {
		contains(t, what, text, "checkpoint skipped:", "step-00000004", "step 2")
	}
	damage(t, dir, 2)
	refused(t, dir, []string{"all of them damaged", "step-00000002", "step-00000004", "another --run-dir"}, "--run-dir",
		dir, config)
}

func TestCheckpointsThatCannotBeReadAreRefused(t *testing.T) {
	t.Parallel()
	config, dir := trained(t)
	checkpoint := filepath.Join(dir, "checkpoints", "step-00000004")
	write(t, checkpoint, "manifest.json", strings.Replace(content(t, checkpoint, "manifest.json"), `"version": 2`,
		`"version": 7`, 1))
	refused(t, dir, []string{"version 7", "another --run-dir"}, "--run-dir", dir, config)

	file := t.TempDir()
	write(t, file, "checkpoints", "")
	refused(t, file, []string{"not a directory", "another --run-dir"}, "--run-dir", file, config)
}

// These models have equal weight shapes.
func TestOtherModelKeysAreRefusedAndOtherDataTold(t *testing.T) {
	t.Parallel()
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
	contains(t, "stderr", stderr, "data.seq_len is 200 in the checkpoint and 100 here", "data.seed", "data.train_on is",
		"sample 4")
	// Equal data and harmless changes cause no message.
	_, stderr = must(t, append(changed, "--set", "train.steps=6", "--set", "optimizer.lr=1.0e-4", config)...)
	if strings.Contains(stderr, "warning") {
		t.Errorf("the same data are warned of:\n%s", stderr)
	}
}

// More steps raise the learning rate of a finished schedule.
func TestAJumpOfTheLearningRateIsTold(t *testing.T) {
	t.Parallel()
	config := small(t, 4)
	dir, _ := trains(t, "--set", "lr_schedule.name=linear", config)
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
	t.Parallel()
	set := func(seed string, more ...string) []string {
		return append([]string{"--set", "data.seq_len=16", "--set", "model.num_hidden_layers=1", "--set", seed},
			more...)
	}
	config := small(t, 4)
	whole, _ := trains(t, set("data.seed=5", config)...)
	parts, _ := trains(t, set("data.seed=5", "--set", "train.steps=2", config)...)
	_, stderr := must(t, set("train.seed=9", "--run-dir", parts, config)...)
	if strings.Contains(stderr, "data.seed") {
		t.Errorf("another order is told of:\n%s", stderr)
	}
	alike(t, "stopped and gone on", parts, whole)
	_, stderr = must(t, set("data.seed=6", "--run-dir", parts, "--set", "train.steps=5", config)...)
	contains(t, "another order", stderr, "data.seed is 5 in the checkpoint and 6 here")
}

// Another spelling of the same model is accepted.
func TestEqualModelsAreNotRefused(t *testing.T) {
	t.Parallel()
	config, dir := trained(t)
	for i, set := range []string{"model.layer_types=[full_attention, full_attention]",
		"model.rope_scaling={rope_type: linear, factor: 1}"} {
		must(t, "--run-dir", dir, "--set", set, "--set", fmt.Sprintf("train.steps=%d", 5+i), config)
	}
}

// The same command resumes after the checkpoint of --resume is gone.
func TestNamedCheckpointIsNeededOnce(t *testing.T) {
	t.Parallel()
	config, dir := trained(t)
	from := filepath.Join(dir, "checkpoints", "step-00000002")
	other := filepath.Join(t.TempDir(), "other")
	args := []string{"--run-dir", other, "--resume", from, config}
	must(t, args...)
	if err := os.RemoveAll(from); err != nil {
		t.Fatal(err)
	}
	_, stderr := must(t, append([]string{"--set", "train.steps=6"}, args...)...)
	contains(t, "it goes on from its own checkpoint", stderr, "going on from step 4 of "+other,
		"--resume "+from+" ignored", "step-00000004")
	own := filepath.Join(other, "checkpoints", "step-00000004")
	for path, want := range map[string]bool{other: false, filepath.Dir(own): false, own: true} {
		_, stderr := must(t, "--run-dir", other, "--set", "train.steps=7", "--resume", path, "--dry-run", config)
		if got := strings.Contains(stderr, " ignored"); got != want {
			t.Errorf("--resume %s reported as ignored: %t\n%s", path, got, stderr)
		}
	}
}

func TestASecondRunInTheDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	s := start(t, filepath.Join(t.TempDir(), "run"), small(t, endless))
	s.afterStep(1)
	before := content(t, s.dir, "config.yaml")
	invalid(t, []string{"--run-dir", s.dir, "--nproc", "2", small(t, 3)}, "locked by another process")
	if content(t, s.dir, "config.yaml") != before {
		t.Error("config.yaml was replaced")
	}
	s.stop()
}

// The text is a line and a sparse terabyte. The search for document ends keeps the input check running as long as the
// test needs.
func TestSignalsWhileInputIsChecked(t *testing.T) {
	t.Parallel()
	text := filepath.Join(t.TempDir(), "text.txt")
	if err := errors.Join(os.WriteFile(text, bytes.Repeat([]byte("a"), 1<<10), 0o600),
		os.Truncate(text, 1<<40)); err != nil {
		t.Fatal(err)
	}
	for _, sig := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGTERM, syscall.SIGINT} {
		s := start(t, filepath.Join(t.TempDir(), "run"), "--set", "data.path="+text, "--set",
			"data.pack_documents=true", "--set", "data.eos_token_id=1", small(t, 1))
		s.until("the text is read", func() bool { return opened(s.Process.Pid, text) })
		signal(t, sig, s.Process.Pid)
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
	t.Parallel()
	base := small(t, 1)
	text := write(t, t.TempDir(), "a.txt", strings.Repeat("a", 5*8+1))
	of := func(epochs, path string) []string {
		return []string{"--set", "train={epochs: " + epochs + ", global_batch_size: 2}", "--set", "data.path=" + path,
			"--set", "data.seq_len=8", "--set", "lr_schedule={warmup_ratio: 0.5}", base}
	}
	for epochs, want := range map[string][]string{"1": {" steps: 3\n", " epochs: null\n", " warmup_steps: 2\n"},
		"2": {" steps: 5\n", " samples: 10\n", " epochs: null\n", " warmup_steps: 3\n"}} {
		stdout, _ := must(t, append([]string{"plan", "--verbose"}, of(epochs, text)...)...)
		contains(t, "the plan of "+epochs, stdout, want...)
	}
	stdout, _ := must(t, append([]string{"plan", "--verbose", "--assume", "gpus=1,arch=sm90"}, of("2", "/no/x.txt")...)...)
	contains(t, "the plan without data", stdout, " steps: null\n", " warmup_ratio: 0.5\n")
	grid := write(t, t.TempDir(), "grid.yaml", fmt.Sprintf("base: %s\nset: {train.epochs: 1}\n"+
		"grid: {data.seq_len: [100, 200]}\nwarmup: 1\n", base))
	must(t, "scale", grid, "--plan", "--out", filepath.Join(t.TempDir(), "scale"))
	run, _ := trains(t, of("1", text)...)
	must(t, append([]string{"--run-dir", run}, of("2", text)...)...)
	metrics := content(t, run, "metrics.jsonl")
	if n := strings.Count(metrics, "\n"); n != 6 || !strings.Contains(metrics, `"epoch":2,`) {
		t.Errorf("%d lines of metrics, want 6:\n%s", n, metrics)
	}
}
