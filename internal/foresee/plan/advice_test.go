package plan

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// planned returns the memory of a 3B llama, on GPUs or a CPU with that many MiB.
func planned(t *testing.T, device string, ranks int, mib int64, set ...string) Memory {
	t.Helper()
	cfg, m := bigLlama(t, device, ranks, mib, set...)
	mem, err := Fit(cfg, ranks, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	return mem
}

// unadvised returns the memory that Fit chooses, without advice, which takes longer.
func unadvised(t *testing.T, cfg *config.Config, ranks int, on machine.Machine) Memory {
	t.Helper()
	d, err := demandOf(cfg, on, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := fit(cfg, ranks, on, d)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func bigLlama(t *testing.T, device string, ranks int, mib int64, set ...string) (*config.Config, machine.Machine) {
	t.Helper()
	cfg, err := config.Load("../../../examples/bench/llama-3.2-3b-32k.yaml", config.Options{Ranks: ranks,
		Device: device, Set: set, NoFiles: true})
	if err != nil {
		t.Fatal(err)
	}
	m := machine.Machine{Memory: mib << 20}
	if device == "cuda" {
		m = machine.Machine{Arch: 90, CUDNN: backends.V(9, 19, 0), Flash: machine.BuiltFlash, GPUs: ranks,
			Memory: mib << 20}
	}
	cfg.Parallel.Backend = "flash"
	return cfg, m
}

var (
	numbers = regexp.MustCompile(`(data.seq_len of at most|at least|--nproc) ([0-9]+)`)
	keys    = regexp.MustCompile(`(memory.(?:shard|recompute|offload|loss_chunk)|train.micro_batch_size) ([a-z0-9]+)`)
)

// The advice makes the run fit, and half of it does not. It leaves out settings that are already there or cannot help.
func TestAdvice(t *testing.T) {
	const gib = 1 << 10
	for i, c := range []struct {
		device   string
		ranks    int
		mib      int64
		set      []string
		says     []string
		never    []string
		together bool // several changes are needed
	}{
		{"cuda", 2, 57 * gib, []string{"memory.shard=none"}, []string{"optimizer", "memory.shard gradients"},
			[]string{"memory.recompute", "lora"}, false},
		{"cuda", 2, 40 * gib, []string{"data.seq_len=256K"}, []string{"activations", "data.seq_len of at most",
			"at least 4 ranks"}, []string{"memory.shard", "memory.recompute"}, false},
		{"cuda", 2, 40 * gib, []string{"data.seq_len=256K", "parallel.algorithm=ulysses"}, []string{
			"at least 4 ranks"}, nil, false}, // 16 and more do not divide the heads
		{"cuda", 8, 60 * gib, []string{"memory.shard=none", "memory.recompute=none"}, []string{"optimizer",
			"memory.shard gradients"}, nil, false},
		{"cuda", 8, 35 * gib, []string{"model.num_hidden_layers=200", "memory.shard=gradients"}, []string{
			"compute copy", "whole on every rank", "memory.shard parameters and at least 16 ranks"}, []string{"seq_len",
			"memory.recompute"}, true},
		{"cuda", 2, 30 * gib, nil, []string{"optimizer", "at least", "lora.r 16"},
			[]string{"memory.recompute", "memory.shard"}, false},
		{"cuda", 1, 30 * gib, nil, []string{"optimizer", "at least", "memory.shard gradients"}, nil, false},
		{"cuda", 2, 20 * gib, []string{"memory.shard=none"}, []string{"optimizer", "at least",
			"memory.shard parameters"}, []string{"memory.recompute"}, true},
		{"cuda", 2, 44 * gib, []string{"data.seq_len=128K", "train.micro_batch_size=2", "train.global_batch_size=2"},
			[]string{"activations", "train.micro_batch_size 1"}, nil, false},
		{"cuda", 2, 59 * gib, []string{"data.seq_len=64K", "memory.recompute=none"}, []string{"activations",
			"memory.recompute selective"}, nil, false},
		{"cpu", 4, 100 * gib, []string{"memory.recompute=full"}, []string{"weights", "whole on every rank",
			"--nproc 2"}, []string{"at least", "memory.shard none", "memory.offload"}, false},
		{"cpu", 1, 100 * gib, []string{"data.seq_len=256K"}, []string{"data.seq_len of at most", "activations"},
			[]string{"at least", "--nproc"}, false},
		{"cpu", 1, 10 * gib, nil, []string{"smaller model"}, []string{"at least", "--nproc", "memory.shard"}, false},
	} {
		if testing.Short() && i%2 == 1 {
			continue
		}
		m := planned(t, c.device, c.ranks, c.mib, c.set...)
		_, advice, _ := strings.Cut(m.Verdict(), "; ")
		t.Logf("%d ranks, %v: %s", c.ranks, c.set, m.Verdict())
		for _, w := range c.says {
			if !strings.Contains(advice, w) {
				t.Errorf("%s, %d ranks, %v: no %q in %s", c.device, c.ranks, c.set, w, advice)
			}
		}
		for _, w := range c.never {
			if strings.Contains(advice, w) {
				t.Errorf("%s, %d ranks, %v: %q in %s", c.device, c.ranks, c.set, w, advice)
			}
		}
		if strings.Contains(advice, "together") != c.together {
			t.Errorf("%s, %d ranks, %v: %s", c.device, c.ranks, c.set, advice)
		}
		if c.together || c.ranks == 1 && c.device == "cuda" { // several keys, or a key and ranks
			continue
		}
		with := func(ranks int, more ...string) *Memory {
			cfg, on := bigLlama(t, c.device, ranks, c.mib, append(slices.Clone(c.set), more...)...)
			m := unadvised(t, cfg, ranks, on)
			return &m
		}
		for _, key := range keys.FindAllStringSubmatch(advice, -1) {
			if less := with(c.ranks, key[1]+"="+key[2]); !less.Fits {
				t.Errorf("%v with %s: %s", c.set, key[0], less.Verdict())
			}
		}
		for _, n := range numbers.FindAllStringSubmatch(advice, -1) {
			value, err := strconv.Atoi(n[2])
			if err != nil {
				t.Fatal(err)
			}
			changed := func(value int) *Memory {
				if strings.HasPrefix(n[1], "data") {
					return with(c.ranks, "data.seq_len="+strconv.Itoa(value))
				}
				return with(value)
			}
			less := map[string]int{"at least": value / 2}[n[1]]
			if less == 0 {
				less = 2 * value
			}
			if is, not := changed(value), changed(less); !is.Fits || not.Fits {
				t.Errorf("%v with %s: %s; with %d: %s", c.set, n[0], is.Verdict(), less, not.Verdict())
			}
		}
	}
}

// Plans leave memory.reserve free, of a CPU once for all its ranks.
func TestReserve(t *testing.T) {
	set := []string{"memory.recompute=none", "memory.loss_chunk=1024", "memory.shard=gradients",
		"checkpoint.async=false"}
	for device, took := range map[string]func(m *Memory) int64{"cuda": func(m *Memory) int64 { return m.Total },
		"cpu": func(m *Memory) int64 { return m.Host }} {
		least := planned(t, device, 2, 1<<30, set...)
		need := took(&least)>>20 + 1
		for _, c := range []struct {
			reserve string
			extra   int64 // MiB beside the need
			fits    bool
		}{
			{"0", 1, true}, {"0", -2, false}, {"1G", 1<<10 + 1, true}, {"1G", 1<<10 - 2, false}, {"50%", need + 2,
				true}, {"50%", need - 4, false},
			{"auto", need * 4 / 100, true}, {"auto", need * 2 / 100, false}, {"3%", need * 2 / 100, false},
			{"2%", need * 3 / 100, true},
		} {
			cfg, on := bigLlama(t, device, 2, need+c.extra, append(set, "memory.reserve="+c.reserve)...)
			m := unadvised(t, cfg, 2, on)
			if m.Fits != c.fits || strings.Contains(m.Verdict(), "memory.reserve") != (c.reserve != "0") {
				t.Errorf("%s with %d MiB beside the need and reserve %s: %s", device, c.extra, c.reserve, m.Verdict())
			}
			if m.Fits && took(&m) > m.Device-m.Reserve {
				t.Errorf("%s with reserve %s: %d bytes and %d in reserve on %d", device, c.reserve, took(&m), m.Reserve,
					m.Device)
			}
		}
	}
}

// Without a known memory everything fits; the ranks of a CPU share the memory of their own host alone.
func TestVerdictByHosts(t *testing.T) {
	if m := planned(t, "cuda", 2, 0); !m.Fits || m.Verdict() != "" || m.Reserve != 0 {
		t.Errorf("memory is not known: %t, %q", m.Fits, m.Verdict())
	}
	on := machine.Machine{Memory: 1 << 30, Hosts: 2}
	for total, fits := range map[int64]bool{480 << 20: true, 520 << 20: false, 1 << 62: false} {
		m := Memory{Weights: total, Device: on.Memory}
		if m.total(&config.Config{}, on, 4); m.Fits != fits {
			t.Errorf("4 ranks of %d bytes on two hosts: %s", total, m.Verdict())
		}
	}
}
