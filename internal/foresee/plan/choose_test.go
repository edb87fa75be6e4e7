package plan

import (
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// fitted returns the choice for a config on GPUs of a machine, and its memory.
func fitted(t *testing.T, name string, ranks int, on machine.Machine, set ...string) (*config.Config, Memory) {
	t.Helper()
	cfg, err := config.Load(filepath.Join("../../../examples/bench", name), config.Options{Ranks: ranks,
		Hosts: on.Hosts, Device: "cuda", Set: set, NoFiles: true})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Parallel.Backend = "flash"
	m, err := Fit(cfg, ranks, on, nil)
	if err != nil {
		t.Fatal(err)
	}
	return cfg, m
}

func gpus(t *testing.T, flags string) machine.Machine {
	t.Helper()
	m, err := machine.Assume([]string{flags})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// A choice that fits does so for workers, which get the resolved config. More memory of either kind never makes a run
// stop fitting, and given values stay.
func TestChoicesFit(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 28))
	pick := func(list ...string) string { return list[r.IntN(len(list))] }
	fits, full, turns, least := 0, 0, 60, 15
	if testing.Short() {
		turns, least = 30, 5
	}
	for range turns {
		shard, recompute := pick("auto", "gradients", "parameters"), pick("auto", "selective", "full")
		offload := pick("auto", "auto", "off", "activations", "both")
		ranks, seq := 1<<r.IntN(4), 1<<(12+r.IntN(9))
		set := []string{fmt.Sprintf("data.seq_len=%d", seq), "model.num_hidden_layers=" + pick("2", "7", "28"),
			"memory.shard=" + shard, "memory.recompute=" + recompute, "memory.offload=" + offload}
		device, ram := int64(12+r.IntN(48))<<30, int64(16+r.IntN(500))<<30
		on := func(device, ram int64) machine.Machine {
			return machine.Machine{Arch: 90, GPUs: 8, Memory: device, RAM: ram, Flash: machine.BuiltFlash}
		}
		cfg, m := fitted(t, "llama-3.2-3b-32k.yaml", ranks, on(device, ram), set...)
		again, err := MemoryOf(cfg, ranks, on(device, ram))
		if again.snapshot = m.snapshot; err != nil || again != m { // auto is decided
			t.Fatalf("%v: Fit says %+v, MemoryOf %+v, %v", set, m, again, err)
		}
		n := int64(ranks)
		host := n*(m.HostTotal-m.HostProcess) <= m.HostDevice-m.HostReserve && m.Host <= m.HostDevice
		if m.Host != n*m.HostTotal+m.HostLauncher || m.Fits != (m.Total <= m.Device-m.Reserve && host) {
			t.Errorf("%v: fits %t with %+v", set, m.Fits, m)
		}
		for _, k := range [][2]string{{shard, cfg.Memory.Shard}, {recompute, cfg.Memory.Recompute},
			{offload, cfg.Memory.Offload}} {
			if k[0] != "auto" && k[0] != k[1] || k[1] == "auto" {
				t.Errorf("%v became %+v", set, cfg.Memory)
			}
		}
		if m.Fits {
			_, larger := fitted(t, "llama-3.2-3b-32k.yaml", ranks, on(2*device, ram), set...)
			_, wider := fitted(t, "llama-3.2-3b-32k.yaml", ranks, on(device, 2*ram), set...)
			if !larger.Fits || !wider.Fits {
				t.Errorf("%v fits; with twice the memory %q, of the host %q", set, larger.Verdict(), wider.Verdict())
			}
			fits++
		}
		if l := m.Layers; l != (Layers{}) {
			full++
			checkLayers(t, cfg, m.Room().Layers, l)
		}
	}
	if fits < turns/3 || full < least {
		t.Errorf("%d choices fit, and %d divide the layers", fits, full)
	}
}

// checkLayers compares the choices of layers with their counts.
func checkLayers(t *testing.T, cfg *config.Config, list []model.Retain, l Layers) {
	t.Helper()
	var have Layers
	for i, k := range list {
		switch {
		case k.Save == model.SaveNothing:
			have.Nothing++
			if cfg.Memory.Recompute != "full" || k.Host || i == 0 {
				t.Errorf("layer %d has no input with recompute %s", i, cfg.Memory.Recompute)
			}
		case k.Host:
			have.Host++
			if have.Device > 0 {
				t.Errorf("layer %d moves, and one below stays: %+v", i, list)
			}
		default:
			have.Device++
		}
	}
	if moves, _ := cfg.Memory.Offloads(); have != l || len(list) != cfg.Model.NumHiddenLayers || l.Host > 0 && !moves {
		t.Errorf("offload %s: %+v, counted as %+v", cfg.Memory.Offload, list, l)
	}
}

// With less memory a run takes other measures, one after the other, and without need none.
func TestChoicesByMemory(t *testing.T) {
	for _, c := range []struct {
		name, assume string
		set          []string
		want         string // recompute, shard, offload
		layers       Layers
	}{
		{"llama-3.2-3b-32k.yaml", "gpu=h100,gpus=8", nil, "none gradients off", Layers{}},
		{"llama-3.2-3b-32k.yaml", "gpu=h100,gpus=1,ram=9G", nil, "selective none off", Layers{}},
		{"llama-3.1-8b.yaml", "gpu=h200,gpus=2,ram=500G", []string{"data.seq_len=1300000"}, "full parameters both",
			Layers{8, 24, 0}},
		{"llama-3.1-8b.yaml", "gpu=h200,gpus=2,ram=300G", []string{"data.seq_len=1300000"}, "full parameters both",
			Layers{7, 21, 4}},
		{"llama-3.1-8b.yaml", "gpu=h200,gpus=1,ram=250G", []string{"data.seq_len=600000"}, "full none both",
			Layers{6, 26, 0}},
		{"llama-3.1-70b.yaml", "gpu=h100,gpus=8", nil, "full parameters both", Layers{18, 62, 0}},
		{"llama-3.1-70b.yaml", "gpu=h100,gpus=8,hosts=2", nil, "selective parameters optimizer", Layers{}},
		{"qwen3-32b.yaml", "gpu=h100,gpus=8", nil, "selective parameters optimizer", Layers{}},
	} {
		on := gpus(t, c.assume)
		cfg, m := fitted(t, c.name, on.GPUs*max(1, on.Hosts), on, c.set...)
		k := &cfg.Memory
		if have := k.Recompute + " " + k.Shard + " " + k.Offload; !m.Fits || have != c.want || m.Layers != c.layers {
			t.Errorf("%s on %s, %v: %s, %+v; %s", c.name, c.assume, c.set, have, m.Layers, m.Verdict())
		}
	}
}

// Offload on a CPU moves every layer to a second slab of the same memory.
func TestOffloadOnACPUSavesNothing(t *testing.T) {
	const mib = 1 << 30
	stay := planned(t, "cpu", 2, mib, "memory.offload=off", "memory.shard=optimizer")
	moved := planned(t, "cpu", 2, mib, "memory.offload=both", "memory.shard=optimizer", "checkpoint.async=false")
	if moved.Layers != (Layers{Host: 28}) || moved.HostActivations == 0 || moved.HostOptimizer < stay.Optimizer ||
		moved.Total+moved.HostTotal < stay.Total {
		t.Errorf("%+v; without offload %+v", moved, stay)
	}
	both := moved.Host >> 20
	for mib, fits := range map[int64]bool{both - 2: false, both + 2: true} {
		m := planned(t, "cpu", 2, mib, "memory.offload=both", "memory.reserve=0", "memory.shard=optimizer",
			"checkpoint.async=false")
		if m.Fits != fits {
			t.Errorf("two slabs of %d MiB on %d: %s", both, mib, m.Verdict())
		}
	}
}

// Layers without input are spread evenly above the first.
func TestRetainSpreads(t *testing.T) {
	for n := 1; n <= 40; n++ {
		for kept := 1; kept <= n; kept++ {
			m := Memory{Layers: Layers{Device: kept / 2, Host: kept - kept/2, Nothing: n - kept}, recompute: "full"}
			list := m.retain()
			run, most := 0, 0
			for _, r := range list {
				if run++; r.Save != model.SaveNothing {
					run = 0
				}
				most = max(most, run)
			}
			if list[0].Save == model.SaveNothing || most > (n-1)/kept || len(list) != n ||
				!slices.IsSortedFunc(slices.DeleteFunc(slices.Clone(list), func(r model.Retain) bool {
					return r.Save == model.SaveNothing
				}), func(a, b model.Retain) int { return b2i(b.Host) - b2i(a.Host) }) {
				t.Errorf("%+v: %+v", m.Layers, list)
			}
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Sharded parameters send weights twice in each pass. Copies to the host cost time only beyond the work beside them.
func TestChoicesCost(t *testing.T) {
	on := gpus(t, "gpu=h200,gpus=8")
	with := func(set ...string) *Plan {
		cfg, _ := fitted(t, "llama-3.2-3b-32k.yaml", 8, on, append([]string{"memory.recompute=full"}, set...)...)
		p, err := Make(cfg, 8, Options{Machine: on, Costs: Costs{Table: round()}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	base := with("memory.shard=gradients")
	parameters := with("memory.shard=parameters")
	weights := base.Communication.Gradients / 3 // gradients of 4 bytes, weights of 2
	if sent := parameters.Communication.Gradients - base.Communication.Gradients; sent != weights {
		t.Errorf("sharded parameters send %d bytes more, want %d", sent, weights)
	}
	// A code takes one byte in place of two. Of each layer, products read all but two norms.
	matrices := int64(28 * (2*3072*3072 + 2*3072*1024 + 3*3072*8192))
	codes := with("memory.shard=parameters", "precision.linears=fp8")
	if saved := parameters.Communication.Gradients - codes.Communication.Gradients; saved != 2*matrices*7/8 {
		t.Errorf("codes save %d bytes of gathers, want %d", saved, 2*matrices*7/8)
	}
	moved := with("memory.shard=gradients", "memory.offload=optimizer")
	if base.Estimate.Parts.Offload != 0 || moved.Estimate.Parts.Offload <= 0 ||
		moved.Estimate.SecondsPerStep <= base.Estimate.SecondsPerStep {
		t.Errorf("%+v, without offload %+v", moved.Estimate, base.Estimate)
	}
}

// Work hides a copy of its length, except a small share.
func TestExposedCopy(t *testing.T) {
	for _, c := range [][3]float64{{1, 2, contention}, {1, 1, contention}, {3, 1, 2}, {0, 1, 0}} {
		if got := exposedCopy(c[0], c[1]); got != c[2] {
			t.Errorf("a copy of %g beside %g costs %g, want %g", c[0], c[1], got, c[2])
		}
	}
	m := Memory{Layers: Layers{Host: model.HostSlots + 2, Device: 5}, HostOptimizer: 1000}
	r := &rehearsal{first: 20, all: 120}
	for range 10 {
		r.layers = append(r.layers, layer{forward: 6, backward: 8, kept: 100, trained: 9})
	}
	r.layers[1].kept = 70
	// Two layers move at 10 bytes a second, each way: 10 s are 4 and 2 beyond the passes, and 7 s are 1 and a share. The
	// optimizer takes 100 s: the pass waits for the 20 parameters of the embedding. Eight layers hide 6 s each, and the 2
	// with activations none.
	update := 100 * 9. / 120
	want := 3*(4+2+1+7*contention) + 100*20./120 + 8*(update-6) + 2*update
	if got := m.offloading(10, r, 3); math.Abs(got-want) > 1e-9 {
		t.Errorf("offload costs %g, want %g", got, want)
	}
}

// Several hosts have a copy of sharded weights each, unless memory is short.
func TestHostsHaveCopiesOfWeights(t *testing.T) {
	set := []string{"memory.shard=parameters", "memory.recompute=full", "memory.offload=off"}
	_, m := fitted(t, "llama-3.1-8b.yaml", 16, gpus(t, "gpu=h100,gpus=8,hosts=2"), set...)
	_, one := fitted(t, "llama-3.1-8b.yaml", 16, gpus(t, "gpu=h100,gpus=16"), set...)
	if m.Copies != 2 || m.Room().Copies != 2 || one.Copies != 1 || m.Compute <= one.Compute ||
		m.Gradients != one.Gradients {
		t.Errorf("%+v, on one host %+v", m, one)
	}
	short := gpus(t, "gpu=h100,gpus=8,hosts=2")
	short.Memory = one.Total*100/97 + 1<<20
	if _, m := fitted(t, "llama-3.1-8b.yaml", 16, short, set...); !m.Fits || m.Copies != 1 {
		t.Errorf("with little memory: %+v", m)
	}
}
