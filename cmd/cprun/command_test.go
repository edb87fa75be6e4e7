package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/ring"
)

func TestUsageEndsWithStatus2BeforeAnythingIsSpawned(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.yaml")
	if err := os.WriteFile(bad, []byte("model: {hidden_sise: 3}\ntrain: {steps: none}\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	good := small(t, 2)
	for _, c := range []struct {
		args []string
		want []string
	}{
		{nil, []string{"train.yaml"}},
		{[]string{"--no-such-flag", good}, []string{"no-such-flag", "cprun -h"}},
		{[]string{"--nporc", "2", good}, []string{"--nporc", "did you mean --nproc?"}},
		{[]string{"-nproc", "2", good}, []string{"did you mean --nproc?"}},
		{[]string{"plan", "--asume", "arch=sm90", good}, []string{"did you mean --assume?"}},
		{[]string{"help", "nosuch"}, []string{`"nosuch"`, "bench"}},
		{[]string{good, good}, []string{filepath.Base(good)}},
		{[]string{"bensch"}, []string{"bensch", "mean bench?"}},
		{[]string{"pln", good}, []string{"mean plan?"}},
		{[]string{"xyzzy"}, []string{"xyzzy", "plan", "attention"}},
		{[]string{"train", good}, []string{`"train"`, "cprun [flags] train.yaml"}},
		{[]string{"trian", good}, []string{"cprun [flags] train.yaml"}},
		{[]string{"run", good}, []string{"cprun [flags] train.yaml"}},
		{[]string{"--np", "2", good}, []string{"did you mean --nproc?"}},
		{[]string{"-np", "2", good}, []string{"did you mean --nproc?"}},
		{[]string{"bensch", "comm"}, []string{`"bensch" is neither`}},
		{[]string{filepath.Join(dir, "none.yaml")}, []string{"none.yaml"}},
		{[]string{bad}, []string{"bad.yaml:1", "hidden_size", "bad.yaml:2", "train.steps"}},
		{[]string{"--nproc", "0", good}, []string{"--nproc"}},
		{[]string{"--nproc", "many", good}, []string{"--nproc"}},
		{[]string{"--nproc", "100000", good}, []string{"--nproc"}},
		{[]string{"--device", "tpu", good}, []string{"auto, cpu or cuda"}},
		{[]string{"--device", "cuda", good}, []string{"CUDA"}},
		{[]string{"--nnodes", "2", good}, []string{"--nnodes"}},
		{[]string{"--nnodes", "2:4", good}, []string{"--nnodes"}},
		{[]string{"--nnodes", "1:4", good}, []string{"--nnodes 1:4", "--rendezvous"}},
		{[]string{"--nnodes", "4:1", good}, []string{"--nnodes", "MIN:MAX"}},
		{[]string{"--nnodes", "0", good}, []string{"--nnodes", "MIN:MAX"}},
		{[]string{"--nnodes", "1", "--node-rank", "1", good}, []string{"--node-rank 1"}},
		{[]string{"--rendezvous", "here", good}, []string{"--rendezvous", "host:port"}},
		{[]string{"--set", "train.stepz=3", good}, []string{"train.steps"}},
		{[]string{"--set", "nonsense", good}, []string{"--set"}},
		{[]string{"--resume", filepath.Join(dir, "nothing"), good}, []string{"--resume"}},
		{[]string{"--set", "data.seq_len=1M", good}, []string{filepath.Base(good) + ":", "data.path", "token"}},
		{[]string{"bench", "train"}, []string{"cprun bench train train.yaml"}},
		{[]string{"bench", "train", good, "--trace", "/nonexistent/x.json"}, []string{"--trace: /nonexistent"}},
		{[]string{"bench", "attention", "--seq", "1T", "--quick"}, []string{"--seq 1099511627776", "GiB"}},
		{[]string{"bench", "attention", "--seq", "64", "--documents", good}, []string{"--seq has no effect"}},
		{[]string{"scale", "--sbatch=-p=gpu", "../../examples/scale/opticks.yaml"}, []string{"--sbatch needs --slurm"}},
		{[]string{"report", good, "--out", "/nonexistent/x.html"}, []string{"--out: /nonexistent"}},
		{[]string{"attention", "--in", "../../attention/attentiontest/testdata/docs.safetensors", "--out", dir},
			[]string{"--out", "is a directory"}},
		{[]string{"attention", "--in", "../../attention/attentiontest/testdata/docs.safetensors", "--out",
			"../../attention/attentiontest/testdata/../testdata/docs.safetensors"}, []string{"--out", "also --in"}},
		{[]string{"attention", "--in", "../../attention/attentiontest/testdata/docs.safetensors", "--out",
			"/proc/self/x"}, []string{"--out", "/proc/self"}},
		{[]string{"attention", "--in", "../../attention/attentiontest/testdata/docs.safetensors", "--out", "/dev/null"},
			[]string{"--out"}},
		{[]string{"attention", "--in", integers(t), "--out", filepath.Join(dir, "x")}, []string{"--in", "I32"}},
		{[]string{"export", dir, "--to", dir}, []string{"--to", dir}},
		{[]string{"export", dir, "--to", bad}, []string{"--to"}},
		{[]string{"--nproc", "2", "--set", "parallel.context=3", good}, []string{"parallel.context"}},
		{[]string{"plan"}, []string{"config"}},
		{[]string{"attention", "--out", "x"}, []string{"--in"}},
		{[]string{"attention", "--in", bad, "--out", filepath.Join(dir, "x")}, []string{"--in"}},
		{[]string{"attention", "--in", "../../attention/attentiontest/testdata/docs.safetensors", "--out",
			filepath.Join(dir, "x"), "--layout", "spiral"}, []string{"spiral", "zigzag"}},
		{[]string{"attention", "--in", "../../attention/attentiontest/testdata/docs.safetensors", "--out",
			filepath.Join(dir, "no", "x")}, []string{"--out"}},
		{[]string{"export", dir, "--to", filepath.Join(dir, "hf")}, []string{"checkpoint"}},
		{[]string{"export", dir}, []string{"--to"}},
	} {
		code, stdout, stderr := cprun(t, c.args...)
		if code != 2 {
			t.Errorf("cprun %v: exit status %d, want 2\n%s%s", c.args, code, stdout, stderr)
		}
		for _, w := range c.want {
			if !strings.Contains(stderr, w) {
				t.Errorf("cprun %v: stderr does not say %q:\n%s", c.args, w, stderr)
			}
		}
	}
}

// A run directory of another model is refused before its config is overwritten.
func TestAnotherModelInTheRunDirectoryIsRefused(t *testing.T) {
	config, dir := small(t, 1), filepath.Join(t.TempDir(), "run")
	must(t, "--run-dir", dir, config)
	before, err := os.ReadFile(filepath.Join(dir, "config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--run-dir", dir}, {"--run-dir", filepath.Join(t.TempDir(), "new"), "--resume",
		dir}} {
		code, _, stderr := cprun(t, append(args, "--set", "model.intermediate_size=40", config)...)
		if code != 2 || !strings.Contains(stderr, "of another model") ||
			!strings.Contains(stderr, "intermediate_size is 64 in the checkpoint and 40 here") {
			t.Errorf("cprun %v with another model: exit status %d, stderr:\n%s", args, code, stderr)
		}
	}
	if after, err := os.ReadFile(filepath.Join(dir, "config.yaml")); err != nil || string(after) != string(before) {
		t.Errorf("config.yaml was replaced (%v)", err)
	}
}

// A config that does not fit the memory is refused before anything is created or started. The plan reports it.
func TestARunThatCannotFitIsRefused(t *testing.T) {
	config, dir := small(t, 1), filepath.Join(t.TempDir(), "run")
	huge := []string{"--nproc", "2", "--set", "model.vocab_size=1G", "--set", "model.hidden_size=16K", config}
	code, _, stderr := cprun(t, append([]string{"--run-dir", dir}, huge...)...)
	if code != 2 || !strings.Contains(stderr, "does NOT fit") || !strings.Contains(stderr, "a rank, with 2 in all") {
		t.Errorf("exit status %d, stderr:\n%s", code, stderr)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s was made (%v)", dir, err)
	}
	if stdout, _ := must(t, append([]string{"plan"}, huge...)...); !strings.Contains(stdout, "does NOT fit") {
		t.Errorf("the plan does not say that it does not fit:\n%s", stdout)
	}
}

// integers writes an attention input with an integer q.
func integers(t *testing.T) string {
	t.Helper()
	header := `{"q":{"dtype":"I32","shape":[1,1,1,1],"data_offsets":[0,4]},` +
		`"k":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[4,8]},` +
		`"v":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[8,12]}}`
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	path := filepath.Join(t.TempDir(), "integers.safetensors")
	if err := os.WriteFile(path, append(append(file, header...), make([]byte, 12)...), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestHelpHasAnExampleEverywhere(t *testing.T) {
	for _, args := range [][]string{{"-h"}, {"plan", "-h"}, {"attention", "-h"}, {"scale", "-h"}, {"export", "-h"},
		{"generate", "-h"}, {"doctor", "-h"}, {"version", "-h"}, {"completion", "-h"}, {"completion", "zsh", "-h"}} {
		stdout, _ := must(t, args...)
		if !strings.Contains(stdout, "Examples:") {
			t.Errorf("cprun %v has no example:\n%s", args, stdout)
		}
	}
}

func TestHelpOfACommandIsThatOfItsFlag(t *testing.T) {
	for _, name := range []string{"plan", "bench"} {
		help, _ := must(t, "help", name)
		if flag, _ := must(t, name, "-h"); help != flag || !strings.Contains(help, "--help") {
			t.Errorf("cprun help %s prints\n%s\ncprun %s -h\n%s", name, help, name, flag)
		}
	}
}

// A run on one node accepts the flags for several nodes, as scripts of other launchers pass them.
func TestOneNodeOfSeveral(t *testing.T) {
	must(t, "--nnodes", "1", "--node-rank", "0", "--rendezvous", "localhost:29400", "--run-dir",
		filepath.Join(t.TempDir(), "run"), small(t, 1))
}

// A command whose output cannot be written fails. If its reader has gone, it says nothing.
func TestStandardOutputThatFails(t *testing.T) {
	closed, err := os.Open(os.DevNull) // for reading
	if err != nil {
		t.Fatal(err)
	}
	defer closed.Close()
	r, gone, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	defer gone.Close()
	const model = "../../internal/model/testdata/parity/tiny-llama"
	eval := []string{"eval", model, "--data", model + "/tokens.bin", "--seq-len", "8", "--samples", "1", "--quiet"}
	for _, args := range [][]string{{"version"}, {"plan", "-h"}, {"completion", "bash"}, eval,
		{"tokenize", "--tokenizer", "bytes", "--to", filepath.Join(t.TempDir(), "x"), "main.go"}} {
		var errs strings.Builder
		c := process(t, args...)
		c.Stdout, c.Stderr = closed, &errs
		c.Run()
		if code := c.ProcessState.ExitCode(); code != 1 || strings.Count(errs.String(), "cprun: ") != 1 {
			t.Errorf("%v, output cannot be written: exit status %d, %q", args, code, errs.String())
		}
	}
	for _, args := range [][]string{{"version"}, eval} {
		var errs strings.Builder
		c := process(t, args...)
		c.Stdout, c.Stderr = gone, &errs
		c.Run()
		status := c.ProcessState.Sys().(syscall.WaitStatus)
		if status.Signal() != syscall.SIGPIPE && status.ExitStatus() != exitPipe || errs.Len() > 0 {
			t.Errorf("%v, without a reader: %v, %q", args, c.ProcessState, errs.String())
		}
	}
}

func TestVersionAndDoctor(t *testing.T) {
	for _, arg := range []string{"version", "--version"} {
		if out, _ := must(t, arg); !strings.HasPrefix(out, "cprun ") {
			t.Errorf("%s: %q", arg, out)
		}
	}
	t.Setenv("TMPDIR", "/nowhere/at all")
	t.Setenv("XDG_CACHE_HOME", strings.Repeat("long/", 100))
	_, short, _ := cprun(t, "doctor")
	_, long, _ := cprun(t, "doctor", "--verbose")
	for _, w := range []string{"cores", "memory", "exchanges", "TMPDIR", "XDG_CACHE_HOME"} {
		if !strings.Contains(short, w) || !strings.Contains(long, w) {
			t.Errorf("doctor does not speak of %s:\n%s", w, short)
		}
	}
	for _, w := range []string{"SLURM_NTASKS", " not set\n", "fused-gpu-only"} { // the rest
		if strings.Contains(short, w) || !strings.Contains(long, w) {
			t.Errorf("%q: in short %t, in long %t", w, strings.Contains(short, w), strings.Contains(long, w))
		}
	}
	// The summary comes first, then problems, then the rest.
	if at := strings.Index(short, "PROBLEM"); !strings.HasPrefix(short, "1 problem: temporary") || at < 0 ||
		at > strings.Index(short, "\nok ") || strings.Contains(short[:at], "ok") {
		t.Errorf("doctor begins with\n%s", short)
	}
	if n := strings.Count(short, "\n"); n > 40 {
		t.Errorf("%d lines:\n%s", n, short)
	}
	for line := range strings.Lines(short) {
		if len(line) > 81 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
}

func TestPlanIsWhatTheRunStores(t *testing.T) {
	config := small(t, 2)
	dir := filepath.Join(t.TempDir(), "run")
	must(t, "--nproc", "2", "--run-dir", dir, config)
	text, err := os.ReadFile(filepath.Join(dir, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	out, _ := must(t, "plan", "--nproc", "2", "--json", config)
	var stored, printed map[string]any
	if err := json.Unmarshal(text, &stored); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &printed); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"config", "partition", "hops", "attention", "memory", "communication", "estimate"} {
		a, b := stored[key], printed[key]
		if a == nil || b == nil {
			t.Errorf("plan has no %s", key)
			continue
		}
		if key == "estimate" { // without a cost table of this machine, both contain a measurement
			for _, e := range []map[string]any{a.(map[string]any), b.(map[string]any)} {
				for _, measured := range []string{"seconds_per_step", "tokens_per_second", "tflops_per_device"} {
					if x, ok := e[measured].(float64); !ok || x <= 0 {
						t.Errorf("%s of an estimate is %v", measured, e[measured])
					}
					delete(e, measured)
				}
				delete(e, "parts")
			}
		}
		x, _ := json.Marshal(a)
		y, _ := json.Marshal(b)
		if string(x) != string(y) {
			t.Errorf("%s of plan.json is %s, printed %s", key, x, y)
		}
	}
	picture, _ := must(t, "plan", "--nproc", "2", "--verbose", config)
	if !strings.Contains(picture, "rank 0") || !strings.Contains(picture, "####") {
		t.Errorf("no picture of the partition:\n%s", picture)
	}
}

// A plan prints the warnings of a run, and fails like the run on faults of the files. For another machine it prints the
// plan anyway.
func TestPlanChecksWhatARunChecks(t *testing.T) {
	long := small(t, 2)
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no data": {[]string{"--set", "data.path=/nope.bin"}, "data.path: no file /nope.bin"},
		"no validation": {[]string{"--set", "data.validation={path: /nope.txt, every: 1}"},
			"data.validation.path: no file /nope.txt"},
		"too little data": {[]string{"--set", "data.seq_len=1M"}, "make no sample of seq_len"},
		"no model":        {[]string{"--set", "model.from=/nope"}, "model.from: no directory /nope"},
	} {
		args := append([]string{"--nproc", "2"}, c.args...)
		code, _, ran := cprun(t, append(args, "--run-dir", filepath.Join(t.TempDir(), "run"), long)...)
		planned, out, stderr := cprun(t, append(append([]string{"plan", "--json"}, args...), long)...)
		if code != 2 || planned != 2 || !strings.Contains(stderr, c.want) || !strings.Contains(ran, c.want) {
			t.Errorf("%s: status %d of the run, %d of the plan; want %q in\n%s\nand\n%s", name, code, planned, c.want,
				ran, stderr)
		}
		var p struct{ Refused []string }
		if err := json.Unmarshal([]byte(out), &p); err != nil || !strings.Contains(strings.Join(p.Refused, "\n"),
			c.want) {
			t.Errorf("%s: refused in the JSON is %q, %v", name, p.Refused, err)
		}
		if code, _, stderr := cprun(t, append(append([]string{"plan", "--assume", "gpus=2"}, args...),
			long)...); code != 0 || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: status %d for another machine:\n%s", name, code, stderr)
		}
	}
	out, stderr := must(t, "plan", "--json", "--set", "data.validation.samples=2", long)
	var p struct{ Warnings []string }
	if err := json.Unmarshal([]byte(out), &p); err != nil || len(p.Warnings) != 1 ||
		!strings.Contains(stderr, "warning: "+p.Warnings[0]) {
		t.Errorf("warnings %q, %v; on the terminal:\n%s", p.Warnings, err, stderr)
	}
}

// A dry run does the checks of a run, and creates nothing.
func TestDryRun(t *testing.T) {
	config, dir := trained(t)
	work := filepath.Join(t.TempDir(), "run")
	if _, stderr := must(t, "--dry-run", "--nproc", "2", "--run-dir", work, config); !strings.Contains(stderr,
		"dry run") || !strings.Contains(stderr, "2 ranks") {
		t.Errorf("it said\n%s", stderr)
	}
	if _, err := os.Stat(work); !os.IsNotExist(err) {
		t.Errorf("it made the run directory: %v", err)
	}
	if _, stderr := must(t, "--dry-run", "--run-dir", dir, config); !strings.Contains(stderr, "step-00000004") {
		t.Errorf("it does not say where it would go on:\n%s", stderr)
	}
	if code, _, stderr := cprun(t, "--dry-run", "--set", "data.path=/nope", config); code != 2 ||
		!strings.Contains(stderr, "/nope") {
		t.Errorf("status %d\n%s", code, stderr)
	}
}

// The exported weights, loaded as a model, must have the same loss as in the run.
func TestExportLoadsToTheSameLoss(t *testing.T) {
	root := t.TempDir()
	dir, hf := filepath.Join(root, "run"), filepath.Join(root, "hf")
	must(t, "--nproc", "2", "--run-dir", dir, "--set", "data.shuffle=false", small(t, 7))
	must(t, "export", dir, "--to", hf)
	// The text has 7 samples of 200 tokens, so step 8 reads the first one again.
	must(t, "--nproc", "2", "--run-dir", dir, "--set", "data.shuffle=false", "--set", "train.steps=8", small(t, 7))
	other := filepath.Join(root, "other")
	must(t, "--nproc", "2", "--run-dir", other, "--set", "data.shuffle=false", "--set", "model.from="+hf, "--set",
		"data.tokenizer=bytes", small(t, 1))
	a, b := metricsOf(t, dir), metricsOf(t, other)
	if x, y := string(a[7]["loss"]), string(b[0]["loss"]); x != y {
		t.Errorf("the exported weights have loss %s, the run had %s", y, x)
	}
	// export refuses a directory that is not empty.
	if code, _, stderr := cprun(t, "export", dir, "--to", hf); code == 0 || !strings.Contains(stderr, hf) {
		t.Errorf("export over %s: exit status %d, %s", hf, code, stderr)
	}
}

func TestAttentionMatchesTheFixtures(t *testing.T) {
	files, err := filepath.Glob("../../attention/attentiontest/testdata/*.safetensors")
	if err != nil || len(files) != 5 {
		t.Fatalf("fixtures: %v, %v", files, err)
	}
	for i, in := range files {
		out := filepath.Join(t.TempDir(), "result.safetensors")
		layout := []string{"zigzag", "striped", "contiguous"}[i%3]
		algorithm := ring.Algorithms[i%len(ring.Algorithms)]
		must(t, "attention", "--in", in, "--out", out, "--nproc", "3", "--layout", layout, "--algorithm", algorithm)
		for _, name := range []string{"out", "lse", "dq", "dk", "dv"} {
			if err := near.Within(read(t, out, name), read(t, in, name), near.Infinities, 1e-5); err != nil {
				t.Errorf("%s, %s, %s: %s: %v", filepath.Base(in), layout, algorithm, name, err)
			}
		}
	}
}

// A packed tensor gives the same result as three tensors, and its layout is printed. Unknown metadata is refused.
func TestAttentionOfPackedTensors(t *testing.T) {
	dir := t.TempDir()
	const in = "../../attention/attentiontest/testdata/causal_mha.safetensors"
	f, err := safetensors.Open(in)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, _ := f.Info("q")
	batch, seq, heads, dim := info.Shape[0], info.Shape[1], info.Shape[2], info.Shape[3]
	row := heads * dim
	qkv := make([]float32, 0, 3*batch*seq*row)
	q, k, v := read(t, in, "q"), read(t, in, "k"), read(t, in, "v")
	for s := range seq { // sb3hd
		for b := range batch {
			for _, x := range [][]float32{q, k, v} {
				qkv = append(qkv, x[(b*seq+s)*row:][:row]...)
			}
		}
	}
	write := func(name string, meta map[string]string) string {
		path := filepath.Join(dir, name)
		whole := map[string]string{"causal": "true", "scale": f.Metadata()["scale"]}
		for key, value := range meta {
			whole[key] = value
		}
		if err := safetensors.WriteFile(path, whole, []safetensors.Entry{
			safetensors.Floats("qkv", safetensors.F32, []int{seq, batch, 3, heads, dim}, qkv),
			safetensors.Floats("dout", safetensors.F32, info.Shape, read(t, in, "dout")),
		}); err != nil {
			t.Fatal(err)
		}
		return path
	}
	run := func(in string, flags ...string) (result, stdout string) {
		result = filepath.Join(dir, "result.safetensors")
		stdout, _ = must(t, append([]string{"attention", "--in", in, "--out", result, "--nproc", "3"}, flags...)...)
		return result, stdout
	}
	result, stdout := run(in)
	if !strings.Contains(stdout, "bshd_bshd_bshd (declared)") {
		t.Errorf("the layout is not shown: %s", stdout)
	}
	want := map[string][]float32{}
	for _, name := range []string{"out", "lse", "dq", "dk", "dv"} {
		want[name] = read(t, result, name)
	}
	for meta, says := range map[string]string{"": "false", "sb3hd": "true"} {
		result, stdout = run(write("packed.safetensors", map[string]string{"layout": meta}), "--json")
		if !strings.Contains(stdout, `"qkv_layout": "sb3hd"`) || !strings.Contains(stdout,
			`"qkv_layout_declared": `+says) {
			t.Errorf("layout %q: %s", meta, stdout)
		}
		for name, w := range want {
			if !slices.Equal(read(t, result, name), w) {
				t.Errorf("layout %q: %s is not that of three tensors", meta, name)
			}
		}
	}
	code, _, stderr := cprun(t, "attention", "--in", write("masked.safetensors", map[string]string{"attn_mask": "x"}),
		"--out", result)
	if code != 2 || !strings.Contains(stderr, `metadata "attn_mask"`) {
		t.Errorf("a mask of another tool: exit status %d, %s", code, stderr)
	}
}

func read(t *testing.T, path, name string) []float32 {
	t.Helper()
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, ok := f.Info(name)
	if !ok {
		t.Fatalf("%s has no %s", path, name)
	}
	n := 1
	for _, d := range info.Shape {
		n *= d
	}
	out := make([]float32, n)
	if err := f.ReadFloat32(name, out, 0); err != nil {
		t.Fatal(err)
	}
	return out
}

// A process with a very low limit of open files prints only the fault and the fix.
func TestFewOpenFiles(t *testing.T) {
	const closed = "exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-; " // the test process may have inherited some
	for _, x := range []struct {
		limit int
		held  string // files open at the start
	}{{4, ""}, {5, ""}, {8, ""}, {8, "exec 3</dev/null 4<&3; "}, {8, "exec 3</dev/null 4<&3 5<&3; "}, {31, ""}} {
		limit := x.limit
		c := process(t, "version")
		c.Args = append([]string{"sh", "-c", closed + x.held + fmt.Sprintf(`ulimit -n %d && exec "$0" "$@"`, limit),
			c.Path}, c.Args[1:]...)
		c.Path = "/bin/sh"
		text, err := c.CombinedOutput()
		said := string(text)
		if c.ProcessState.ExitCode() != 2 || strings.Count(said, "\n") != 1 ||
			!strings.Contains(said, fmt.Sprint(limit)) || !strings.Contains(said, "ulimit -n") {
			t.Errorf("limit %d: %v\n%s", limit, err, said)
		}
	}
}
