package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
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

const fixtures = "../../attention/attentiontest/testdata/"

func TestUsageEndsWithStatus2BeforeAnythingIsSpawned(t *testing.T) {
	t.Parallel()
	dir, good := t.TempDir(), small(t, 2)
	bad := write(t, dir, "bad.yaml", "model: {hidden_sise: 3}\ntrain: {steps: none}\n")
	// G is a config, BAD one with faults, D a directory, IN an input of cprun attention.
	replace := strings.NewReplacer("G", good, "BAD", bad, "D/", dir+"/", "IN", fixtures+"docs.safetensors", "I32", integers(t))
	for args, want := range map[string][]string{
		"":                           {"train.yaml"},
		"--no-such-flag G":           {"no-such-flag", "cprun -h"},
		"--nporc 2 G":                {"--nporc", "did you mean --nproc?"},
		"-nproc 2 G":                 {"did you mean --nproc?"},
		"plan --asume arch=sm90 G":   {"did you mean --assume?"},
		"help nosuch":                {`"nosuch"`, "bench"},
		"G G":                        {filepath.Base(good)},
		"bensch":                     {"bensch", "mean bench?"},
		"pln G":                      {"mean plan?"},
		"xyzzy":                      {"xyzzy", "plan", "attention"},
		"train G":                    {`"train"`, "cprun [flags] train.yaml"},
		"trian G":                    {"cprun [flags] train.yaml"},
		"run G":                      {"cprun [flags] train.yaml"},
		"--np 2 G":                   {"did you mean --nproc?"},
		"-np 2 G":                    {"did you mean --nproc?"},
		"bensch comm":                {`"bensch" is neither`},
		"D/none.yaml":                {"none.yaml"},
		"BAD":                        {"bad.yaml:1", "hidden_size", "bad.yaml:2", "train.steps"},
		"--nproc 0 G":                {"--nproc"},
		"--nproc many G":             {"--nproc"},
		"--nproc 100000 G":           {"--nproc"},
		"--device tpu G":             {"auto, cpu or cuda"},
		"--device cuda G":            {"CUDA"},
		"--nnodes 2 G":               {"--nnodes"},
		"--nnodes 2:4 G":             {"--nnodes"},
		"--nnodes 1:4 G":             {"--nnodes 1:4", "--rendezvous"},
		"--nnodes 4:1 G":             {"--nnodes", "MIN:MAX"},
		"--nnodes 0 G":               {"--nnodes", "MIN:MAX"},
		"--nnodes 1 --node-rank 1 G": {"--node-rank 1"},
		"--rendezvous here G":        {"--rendezvous", "host:port"},
		"--set train.stepz=3 G":      {"train.steps"},
		"--set nonsense G":           {"--set"},
		"--resume D/nothing G":       {"--resume"},
		"--set data.seq_len=1M G":    {filepath.Base(good) + ":", "data.path", "token"},
		"bench train":                {"cprun bench train train.yaml"},
		"bench train G --trace /nonexistent/x.json":                            {"--trace: /nonexistent"},
		"bench attention --seq 1T --quick":                                     {"--seq 1099511627776", "GiB"},
		"bench attention --seq 64 --documents G":                               {"--seq has no effect"},
		"scale --sbatch=-p=gpu ../../examples/scale/lengths.yaml":              {"--sbatch needs --slurm"},
		"report G --out /nonexistent/x.html":                                   {"--out: /nonexistent"},
		"attention --in IN --out D/":                                           {"--out", "is a directory"},
		"attention --in IN --out " + fixtures + "../testdata/docs.safetensors": {"--out", "also --in"},
		"attention --in IN --out /proc/self/x":                                 {"--out", "/proc/self"},
		"attention --in IN --out /dev/null":                                    {"--out"},
		"attention --in I32 --out D/x":                                         {"--in", "I32"},
		"export D/ --to D/":                                                    {"--to", dir},
		"export D/ --to BAD":                                                   {"--to"},
		"--nproc 2 --set parallel.context=3 G":                                 {"parallel.context"},
		"plan":                                                                 {"config"},
		"attention --out x":                                                    {"--in"},
		"attention --in BAD --out D/x":                                         {"--in"},
		"attention --in IN --out D/x --layout spiral":                          {"spiral", "zigzag"},
		"attention --in IN --out D/no/x":                                       {"--out"},
		"export D/ --to D/hf":                                                  {"checkpoint"},
		"export D/":                                                            {"--to"},
	} {
		invalid(t, strings.Fields(replace.Replace(args)), want...)
	}
}

// A run directory of another model is refused before its config is overwritten.
func TestAnotherModelInTheRunDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	config := small(t, 1)
	dir, _ := trains(t, config)
	for _, args := range [][]string{{"--run-dir", dir}, {"--run-dir", filepath.Join(t.TempDir(), "new"), "--resume", dir}} {
		refused(t, dir, []string{"of another model", "intermediate_size is 64 in the checkpoint and 40 here"},
			append(args, "--set", "model.intermediate_size=40", config)...)
	}
}

// A port of log.prometheus that is in use is found before anything is created or started.
func TestAPortInUseIsRefused(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dir := filepath.Join(t.TempDir(), "run")
	invalid(t, []string{"--run-dir", dir, "--set", "log.prometheus=" + l.Addr().String(), small(t, 1)}, "log.prometheus",
		"in use", "choose another port")
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s was made (%v)", dir, err)
	}
}

// A config that does not fit the memory is refused before anything is created or started. The plan reports it.
func TestARunThatCannotFitIsRefused(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	huge := []string{"--nproc", "2", "--set", "model.vocab_size=1G", "--set", "model.hidden_size=16K", small(t, 1)}
	invalid(t, append([]string{"--run-dir", dir}, huge...), "does NOT fit", "a rank, with 2 in all")
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s was made (%v)", dir, err)
	}
	stdout, _ := must(t, append([]string{"plan"}, huge...)...)
	contains(t, "the plan", stdout, "does NOT fit")
}

// integers writes an attention input with an integer q.
func integers(t *testing.T) string {
	t.Helper()
	header := `{"q":{"dtype":"I32","shape":[1,1,1,1],"data_offsets":[0,4]},` +
		`"k":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[4,8]},` +
		`"v":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[8,12]}}`
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return write(t, t.TempDir(), "integers.safetensors", string(append(append(file, header...), make([]byte, 12)...)))
}

func TestHelpHasAnExampleEverywhere(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"", "plan", "attention", "scale", "export", "generate", "doctor", "version",
		"completion", "completion zsh", "bench", "bench attention", "bench comm", "bench train", "bench ops",
		"bench calibrate"} {
		stdout, _ := must(t, strings.Fields(command+" -h")...)
		contains(t, command, stdout, "Examples:")
	}
}

func TestHelpOfACommandIsThatOfItsFlag(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"plan", "bench"} {
		help, _ := must(t, "help", name)
		if flag, _ := must(t, name, "-h"); help != flag || !strings.Contains(help, "--help") {
			t.Errorf("cprun help %s prints\n%s\ncprun %s -h\n%s", name, help, name, flag)
		}
	}
}

// A run on one node accepts the flags for several nodes, as scripts of other launchers pass them.
func TestOneNodeOfSeveral(t *testing.T) {
	t.Parallel()
	trains(t, "--nnodes", "1", "--node-rank", "0", "--rendezvous", "localhost:29400", small(t, 1))
}

// A command whose output cannot be written fails. If its reader has gone, it says nothing.
func TestStandardOutputThatFails(t *testing.T) {
	t.Parallel()
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
	run := func(stdout *os.File, args []string) (s *os.ProcessState, stderr string) {
		var errs strings.Builder
		c := process(t, args...)
		c.Stdout, c.Stderr = stdout, &errs
		c.Run() // the state has the status
		return c.ProcessState, errs.String()
	}
	for _, args := range [][]string{{"version"}, {"plan", "-h"}, {"completion", "bash"}, eval,
		{"tokenize", "--tokenizer", "bytes", "--to", filepath.Join(t.TempDir(), "x"), "main.go"}} {
		if s, errs := run(closed, args); s.ExitCode() != 1 || strings.Count(errs, "cprun: ") != 1 {
			t.Errorf("%v, output cannot be written: %v, %q", args, s, errs)
		}
	}
	for _, args := range [][]string{{"version"}, eval} {
		s, errs := run(gone, args)
		status := s.Sys().(syscall.WaitStatus)
		if status.Signal() != syscall.SIGPIPE && status.ExitStatus() != exitPipe || errs != "" {
			t.Errorf("%v, without a reader: %v, %q", args, s, errs)
		}
	}
}

func TestVersionAndDoctor(t *testing.T) {
	t.Parallel()
	for _, arg := range []string{"version", "--version"} {
		if out, _ := must(t, arg); !strings.HasPrefix(out, "cprun ") || !strings.Contains(out, " dev") {
			t.Errorf("%s: %q, want dev, as make has not built the test", arg, out)
		}
	}
	env := []string{"TMPDIR=/nowhere/at all", "XDG_CACHE_HOME=" + strings.Repeat("long/", 100)}
	_, short, _ := with(t, env, "doctor")
	_, long, _ := with(t, env, "doctor", "--verbose")
	for _, w := range []string{"cores", "memory", "exchanges", "TMPDIR", "XDG_CACHE_HOME"} {
		if !strings.Contains(short, w) || !strings.Contains(long, w) {
			t.Errorf("doctor does not speak of %s:\n%s", w, short)
		}
	}
	contains(t, "doctor --verbose", long, "attention backends on a CPU", "flash", "not fused, fused-gpu-only", "fix:",
		"NVTE_DEBUG_LEVEL")
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
	fitsTerminal(t, short)
}

func TestPlanIsWhatTheRunStores(t *testing.T) {
	t.Parallel()
	config := small(t, 2)
	dir, _ := trains(t, "--nproc", "2", config)
	out, _ := must(t, "plan", "--nproc", "2", "--json", config)
	var stored, printed map[string]any
	decode(t, content(t, dir, "plan.json"), &stored)
	decode(t, out, &printed)
	for _, key := range []string{"config", "partition", "hops", "attention", "memory", "communication", "estimate"} {
		a, b := stored[key], printed[key]
		if a == nil || b == nil {
			t.Errorf("plan has no %s", key)
			continue
		}
		if key == "estimate" { // without a cost table of this machine, both contain a measurement
			for _, e := range []map[string]any{a.(map[string]any), b.(map[string]any)} {
				for _, measured := range []string{"seconds_per_step", "run_seconds", "tokens_per_second",
					"tflops_per_device"} {
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
	contains(t, "the picture of the partition", picture, "rank 0", "####")
}

// A plan prints the warnings of a run, and fails like the run on faults of the files. For another machine it prints the
// plan anyway.
func TestPlanChecksWhatARunChecks(t *testing.T) {
	t.Parallel()
	long := small(t, 2)
	for name, c := range map[string][2]string{
		"no data":         {"data.path=/nope.bin", "data.path: no file /nope.bin"},
		"no validation":   {"data.validation={path: /nope.txt, every: 1}", "data.validation.path: no file /nope.txt"},
		"too little data": {"data.seq_len=1M", "make no sample of seq_len"},
		"no model":        {"model.from=/nope", "model.from: no directory /nope"},
	} {
		want, args := c[1], []string{"--nproc", "2", "--set", c[0], long}
		invalid(t, append([]string{"--run-dir", filepath.Join(t.TempDir(), "run")}, args...), want)
		planned, out, stderr := cprun(t, append([]string{"plan", "--json"}, args...)...)
		if planned != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d of the plan; want %q in\n%s", name, planned, want, stderr)
		}
		var p struct{ Refused []string }
		decode(t, out, &p)
		contains(t, "refused in the JSON", strings.Join(p.Refused, "\n"), want)
		out, _ = must(t, append([]string{"plan", "--assume", "gpus=2"}, args...)...)
		contains(t, "the plan for another machine", strings.Join(strings.Fields(out), " "), want)
	}
	out, stderr := must(t, "plan", "--json", "--set", "data.validation.samples=2", long)
	var p struct{ Warnings []string }
	if decode(t, out, &p); len(p.Warnings) != 1 || !strings.Contains(stderr, "warning: "+p.Warnings[0]) {
		t.Errorf("warnings %q; on the terminal:\n%s", p.Warnings, stderr)
	}
}

// A dry run does the checks of a run, and creates nothing.
func TestDryRun(t *testing.T) {
	t.Parallel()
	config, dir := trained(t)
	work := filepath.Join(t.TempDir(), "run")
	_, stderr := must(t, "--dry-run", "--nproc", "2", "--run-dir", work, config)
	contains(t, "stderr", stderr, "dry run", "2 ranks")
	if _, err := os.Stat(work); !os.IsNotExist(err) {
		t.Errorf("it made the run directory: %v", err)
	}
	_, stderr = must(t, "--dry-run", "--run-dir", dir, config)
	contains(t, "where it would go on", stderr, "step-00000004")
	invalid(t, []string{"--dry-run", "--set", "data.path=/nope", config}, "/nope")
}

// The exported weights, loaded as a model, must have the same loss as in the run.
func TestExportLoadsToTheSameLoss(t *testing.T) {
	t.Parallel()
	hf, set := filepath.Join(t.TempDir(), "hf"), []string{"--nproc", "2", "--set", "data.shuffle=false"}
	dir, _ := trains(t, append(set, small(t, 7))...)
	must(t, "export", dir, "--to", hf)
	// The text has 7 samples of 200 tokens, so step 8 reads the first one again.
	must(t, append(set, "--run-dir", dir, "--set", "train.steps=8", small(t, 7))...)
	other, _ := trains(t, append(set, "--set", "model.from="+hf, "--set", "data.tokenizer=bytes", small(t, 1))...)
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
	t.Parallel()
	files, err := filepath.Glob(fixtures + "*.safetensors")
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
	t.Parallel()
	dir := t.TempDir()
	const in = fixtures + "causal_mha.safetensors"
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
	masked := write("masked.safetensors", map[string]string{"attn_mask": "x"})
	invalid(t, []string{"attention", "--in", masked, "--out", result}, `metadata "attn_mask"`)
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
	out := make([]float32, info.Elements())
	if err := f.ReadFloat32(name, out, 0); err != nil {
		t.Fatal(err)
	}
	return out
}

// A process with a very low limit of open files prints only the fault and the fix.
func TestFewOpenFiles(t *testing.T) {
	t.Parallel()
	const closed = "exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-; " // the test process may have inherited some
	for _, x := range []struct {
		limit int
		held  string // files open at the start
	}{{4, ""}, {5, ""}, {8, ""}, {8, "exec 3</dev/null 4<&3; "}, {8, "exec 3</dev/null 4<&3 5<&3; "}, {31, ""}} {
		c := within(process(t, "version"), closed+x.held+fmt.Sprintf("ulimit -n %d", x.limit))
		text, err := c.CombinedOutput()
		if c.ProcessState.ExitCode() != 2 || strings.Count(string(text), "\n") != 1 {
			t.Errorf("limit %d: %v\n%s", x.limit, err, text)
		}
		contains(t, "stderr", string(text), fmt.Sprint(x.limit), "ulimit -n")
	}
}
