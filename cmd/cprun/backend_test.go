package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// planned holds the parts of cprun plan --json that these tests read.
type planned struct {
	Machine   string
	Config    map[string]map[string]any
	Partition struct {
		SeqLen         int `json:"seq_len"`
		Ranks, Context int
	}
	Attention struct {
		Backend, Layout string
		Rejected        []struct{ Backend, Rule, Hop string }
		Remedies        []struct{ Kind string }
	}
	Memory struct {
		Weights, Optimizer, Total, Device, Reserve int64
		ComputeWeights                             int64 `json:"compute_weights"`
		Fits                                       bool
	}
	Communication struct {
		AttentionForward int64 `json:"attention_forward"`
	}
	Estimate struct {
		SecondsPerStep  float64 `json:"seconds_per_step"`
		TokensPerSecond float64 `json:"tokens_per_second"`
		MFU             float64
		Scaled          bool
		Table           string
	}
}

func plan(t *testing.T, args ...string) (p planned) {
	t.Helper()
	out, _ := must(t, append([]string{"plan", "--json"}, args...)...)
	decode(t, out, &p)
	return p
}

// rejects reports whether a rule rejected a backend, and in which hops.
func (p *planned) rejects(backend, rule string) (hops []string, ok bool) {
	for _, r := range p.Attention.Rejected {
		if r.Backend == backend && r.Rule == rule {
			ok = true
			hops = append(hops, r.Hop)
		}
	}
	return hops, ok
}

const cases = "../../examples/cases/"

// Case 1: [48, 16534, 18, 128] bf16 under context parallelism, cuDNN 8.9.7 and 9.0.0.
func TestCaseLengthsAndCUDNN(t *testing.T) {
	t.Parallel()
	args := func(cudnn, backend string) []string {
		return []string{cases + "seqlen-cudnn.yaml", "--nproc", "2", "--assume", "arch=sm80,cudnn=" + cudnn, "--set",
			"attention.backend=" + backend}
	}
	p := plan(t, args("8.9.7", "auto")...)
	if p.Attention.Backend != "flash" || p.Attention.Layout != "bshd_bshd_bshd" {
		t.Errorf("on sm80 auto is %s in %s, want flash", p.Attention.Backend, p.Attention.Layout)
	}
	hops, ok := p.rejects("fused", "fused-seq-multiple-64")
	if !ok || !slices.Contains(hops, "diagonal") || !slices.Contains(hops, "half keys") ||
		!slices.Contains(hops, "half queries") {
		t.Errorf("fused-seq-multiple-64 speaks of hops %q, want the diagonal, half keys and half queries", hops)
	}
	invalid(t, append([]string{"plan"}, args("8.9.7", "fused")...), "fused-seq-multiple-64", "9.0.0")
	p = plan(t, args("9.0.0", "fused")...)
	if p.Attention.Backend != "fused" || len(p.Attention.Remedies) != 0 {
		t.Errorf("with cuDNN 9.0.0 %s runs with %v, want fused as it is", p.Attention.Backend, p.Attention.Remedies)
	}
	if _, ok = p.rejects("fused", "fused-seq-multiple-64"); ok {
		t.Error("cuDNN 9.0.0 still wants multiples of 64")
	}
}

// Case 2: head dim 192 in training on H100.
func TestCaseHeadDims(t *testing.T) {
	t.Parallel()
	config := cases + "head-dims.yaml"
	p := plan(t, config, "--assume", "arch=sm90,cudnn=9.1.0,gpus=8")
	if _, ok := p.rejects("fused", "fused-head-dim-sm90-training-9.5.0"); p.Attention.Backend != "flash" || !ok {
		t.Errorf("cuDNN 9.1.0: %s, %+v", p.Attention.Backend, p.Attention.Rejected)
	}
	p = plan(t, config, "--assume", "arch=sm90,cudnn=9.5.0,gpus=8", "--set", "attention.backend=fused")
	if p.Attention.Backend != "fused" {
		t.Errorf("cuDNN 9.5.0: %s, want fused: %+v", p.Attention.Backend, p.Attention.Rejected)
	}
	code, stdout, stderr := cprun(t, "plan", config, "--assume", "arch=sm90,cudnn=9.1.0,gpus=8", "--set",
		"attention.backend=fused")
	if code != 2 || stdout != "" {
		t.Errorf("fused with cuDNN 9.1.0: exit status %d, want 2\n%s", code, stdout)
	}
	contains(t, "fused with cuDNN 9.1.0", stderr, "--set attention.backend=fused: attention.backend: fused",
		"sm90, cuDNN 9.1.0", "fused-head-dim-sm90-training-9.5.0", "backward", "Fix: ", "9.5.0")
}

// Case 3: the model's q, k and v are dense with any number of heads.
func TestCaseMultiQuery(t *testing.T) {
	t.Parallel()
	p := plan(t, cases+"multi-query.yaml", "--nproc", "2", "--assume", "arch=sm90,cudnn=9.2.1", "--set",
		"attention.backend=fused")
	if p.Attention.Layout != "bshd_bshd_bshd" || p.Attention.Backend != "fused" ||
		p.Config["precision"]["compute"] != "fp16" {
		t.Errorf("%s in %s: %+v", p.Attention.Backend, p.Attention.Layout, p.Attention.Rejected)
	}
}

// Layers with different windows share one backend.
func TestCaseWindows(t *testing.T) {
	t.Parallel()
	p := plan(t, cases+"windows.yaml", "--assume", "arch=sm90,cudnn=9.1.0,gpus=8")
	hops, ok := p.rejects("fused", "fused-window-9.2.0")
	if p.Attention.Backend != "flash" || !ok || !strings.Contains(strings.Join(hops, "\n"), "window of 4096 keys") {
		t.Errorf("%s, hops %q", p.Attention.Backend, hops)
	}
}

func TestAssumedMachine(t *testing.T) {
	t.Parallel()
	p := plan(t, "../../examples/opticks.yaml", "--assume", "arch=sm90,cudnn=9.18.1,gpus=8", "--assume",
		"memory=80G,link=450G")
	if p.Partition.Ranks != 8 || p.Partition.Context != 8 {
		t.Errorf("gpus=8 makes %d ranks, %d of them a sequence's", p.Partition.Ranks, p.Partition.Context)
	}
	for key, want := range map[string]string{"precision.compute": "bf16", "memory.recompute": "none",
		"memory.shard": "gradients", "attention.backend": p.Attention.Backend} {
		section, name, _ := strings.Cut(key, ".")
		if got := p.Config[section][name]; got != want {
			t.Errorf("%s is %v, want %s", key, got, want)
		}
	}
	// Each of 8 ranks has an eighth of the weights in float32, and all of them in bf16.
	if copies := p.Memory.ComputeWeights; p.Memory.Optimizer != 2*p.Memory.Weights || copies < 4*p.Memory.Weights ||
		copies > 5*p.Memory.Weights {
		t.Errorf("weights %d, in bf16 %d, optimizer %d of 8 ranks", p.Memory.Weights, p.Memory.ComputeWeights,
			p.Memory.Optimizer)
	}
	if !p.Memory.Fits || p.Memory.Device != 80<<30 {
		t.Errorf("memory %+v", p.Memory)
	}
	e := p.Estimate
	if e.SecondsPerStep <= 0 || e.TokensPerSecond <= 0 || e.MFU <= 0 || !e.Scaled || e.Table != "NVIDIA H100 80GB HBM3" {
		t.Errorf("estimate %+v", e)
	}
	// Backward, gradients return in float32, and keys and values go out in bf16.
	cpu := plan(t, "../../examples/opticks.yaml", "--nproc", "8")
	if 2*p.Communication.AttentionForward != cpu.Communication.AttentionForward {
		t.Errorf("bf16 keys and values take %d bytes, float32 ones %d", p.Communication.AttentionForward,
			cpu.Communication.AttentionForward)
	}
	if !strings.HasPrefix(cpu.Machine, "arch=cpu,memory=") ||
		p.Machine != fmt.Sprintf("arch=sm90,cudnn=9.18.1,flash=built,gpus=8,memory=%d,link=%d", 80<<30, 450<<30) {
		t.Errorf("machines %q and %q", cpu.Machine, p.Machine)
	}
	out, _ := must(t, "plan", "../../examples/opticks.yaml", "--assume", "arch=sm90,gpus=8,memory=16M", "--set",
		"data.seq_len=64K")
	contains(t, "the plan", out, "does NOT fit the 16 MiB", "cost table of NVIDIA H100 80GB HBM3",
		"backend     flash on sm90, no cuDNN")
}

func TestAssumeFaultsEndWithStatus2(t *testing.T) {
	t.Parallel()
	config := small(t, 2)
	for args, want := range map[string][]string{
		"--assume arhc=sm90":                                          {"did you mean arch?"},
		"--assume arch=sm90 --assume arch=sm80":                       {"given before"},
		"--assume cudnn=9.1.0":                                        {"arch=sm90"},
		"--assume arch=sm90,gpus=2 --nproc 4":                         {"gpus=2"},
		"--assume arch=sm90 --device cpu":                             {"--device cpu", "arch=sm90"},
		"--device cuda":                                               {"--device cuda", "--assume"},
		"--set attention.backend=fused":                               {"attention.backend", "fused", "CUDA"},
		"--assume arch=sm70,flash=none --set attention.backend=fused": {"fused-arch-sm80", "fused-not-installed", "Fix: "},
	} {
		invalid(t, append([]string{"plan", config}, strings.Fields(args)...), want...)
	}
	must(t, "plan", config, "--device", "cuda", "--assume", "arch=sm90")
}

func TestEnvironmentOfTransformerEngine(t *testing.T) {
	t.Parallel()
	gpu := []string{"plan", cases + "multi-query.yaml", "--nproc", "2", "--assume", "arch=sm90,cudnn=9.18.1", "--json"}
	fused := append(gpu[:len(gpu):len(gpu)], "--set", "attention.backend=fused")
	for env, c := range map[string]struct {
		code   int
		args   []string
		stdout string
		stderr []string
	}{
		"NVTE_FUSED_ATTN=0": {0, gpu, `"backend": "flash"`, []string{"environment: NVTE_FUSED_ATTN=0"}},
		// With both disabled, auto has no candidate, and the message suggests reference.
		"NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0": {2, gpu, "",
			[]string{"flash-disabled", "fused-disabled", "Fix: Set attention.backend to reference."}},
		"NVTE_FLASH_ATTN=off NVTE_DEBUG_LEVEL=most": {2, gpu, "",
			[]string{`NVTE_FLASH_ATTN="off"`, `NVTE_DEBUG_LEVEL="most"`}},
		"NVTE_FUSED_ATTN=0 ": {2, fused, "", []string{"fused-disabled", "environment: NVTE_FUSED_ATTN=0"}},
	} {
		code, stdout, stderr := with(t, strings.Fields(env), c.args...)
		if code != c.code {
			t.Errorf("%s, %q: exit status %d, want %d", env, c.args, code, c.code)
		}
		contains(t, env, stdout, c.stdout)
		contains(t, env, stderr, c.stderr...)
	}
	_, stdout, _ := with(t, []string{"NVTE_DEBUG=1"}, "doctor")
	if strings.Contains(stdout, "NVTE_FUSED_ATTN") || !strings.Contains(stdout, `NVTE_DEBUG           "1"`) {
		t.Errorf("doctor does not list what is set:\n%s", stdout)
	}
}

func TestDebugSaysWhatWasChosen(t *testing.T) {
	t.Parallel()
	config := small(t, 1)
	run := func(env []string, args ...string) string {
		dir := filepath.Join(t.TempDir(), "run")
		code, _, stderr := with(t, env, append([]string{"--nproc", "2", "--run-dir", dir, config}, args...)...)
		if code != 0 {
			t.Fatalf("exit status %d:\n%s", code, stderr)
		}
		return stderr
	}
	if quiet := run(nil); strings.Contains(quiet, "attention:") {
		t.Errorf("debug 0 speaks:\n%s", quiet)
	}
	contains(t, "debug 1", run(nil, "--set", "attention.debug=1"), "attention: flash")
	for _, two := range []string{run(nil, "--set", "attention.debug=2"),
		run([]string{"NVTE_DEBUG=1", "NVTE_DEBUG_LEVEL=2"})} {
		contains(t, "debug 2", two, "flash", "fused-gpu-only", "bshd_bshd_bshd",
			"shape [1 100 4 8], strides [3200 32 8 1]", "ring", "zigzag")
	}
	contains(t, "without flash", run([]string{"NVTE_FLASH_ATTN=0", "NVTE_DEBUG=1", "NVTE_DEBUG_LEVEL=1"}),
		"attention: reference")
}

func TestAttentionHonoursTheEnvironment(t *testing.T) {
	t.Parallel()
	args := []string{"attention", "--in", fixtures + "docs.safetensors", "--out", filepath.Join(t.TempDir(), "x"),
		"--nproc", "2", "--json"}
	code, stdout, stderr := with(t, []string{"NVTE_FLASH_ATTN=0"}, args...)
	if code != 0 || !strings.Contains(stdout, `"backend": "reference"`) ||
		!strings.Contains(stderr, "environment: NVTE_FLASH_ATTN=0") {
		t.Errorf("exit status %d:\n%s%s", code, stdout, stderr)
	}
	invalid(t, append(args, "--backend", "fused"), "fused-gpu-only")
}
