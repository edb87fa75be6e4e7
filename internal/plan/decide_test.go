package plan

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// flat is costs of a machine that computes a pair of positions of a head in the same time whatever the shape.
type flat struct{ pair, byte, start float64 }

func (f flat) Call(c planner.Call) float64 {
	return f.start + f.pair*float64(partition.Pairs(c.Tiles)*c.Heads*c.Batch)
}
func (f flat) Exchange(_ bool, bytes int64, _ int) float64 { return f.start + f.byte*float64(bytes) }
func (f flat) Copy(bytes int64) float64                    { return f.byte / 10 * float64(bytes) }
func (f flat) Host(int) float64                            { return 0 }
func (f flat) Has(backend string, _ tensor.DType) bool     { return backend != "reference" }

func decided(t *testing.T, costs planner.Costs, m machine.Machine, ranks int, set ...string) (*config.Config, *Chosen) {
	t.Helper()
	d := &Decider{Machine: m, Costs: func(_, _ int) planner.Costs { return costs }}
	if costs == nil {
		d.Costs = func(_, _ int) planner.Costs { return nil }
	}
	cfg, err := config.Load("../../examples/bench/llama-3.2-3b-32k.yaml", config.Options{
		Ranks: ranks, Hosts: m.Hosts, Device: m.Device(), NoFiles: true,
		Set: append([]string{"parallel.algorithm=auto", "parallel.layout=auto"}, set...), Decide: d.Decide,
	})
	if err != nil {
		t.Fatal(err)
	}
	return cfg, d.Chosen
}

var h200 = machine.Machine{Arch: 90, GPUs: 8, Memory: 140 << 30, Flash: machine.BuiltFlash}

func TestDecideWithoutCostsKeepsTheRules(t *testing.T) {
	cfg, chosen := decided(t, nil, h200, 8)
	if p := cfg.Parallel; chosen != nil || p.Algorithm != "ring" || p.Layout != "zigzag" || p.Context != 8 || cfg.Attention.Backend != "auto" {
		t.Errorf("%+v, %+v", chosen, p)
	}
}

func TestDecideFillsWhatIsOpen(t *testing.T) {
	fast, slow := flat{pair: 1e-12, byte: 1 / 450e9, start: 1e-5}, flat{pair: 1e-12, byte: 1e-9, start: 1e-5}
	cfg, chosen := decided(t, fast, h200, 8)
	if chosen == nil || cfg.Parallel.Layout != chosen.Layers[0].Ranked[0].Layout || cfg.Parallel.Algorithm != chosen.Layers[0].Ranked[0].Algorithm {
		t.Fatalf("%+v, %+v", cfg.Parallel, chosen)
	}
	// Under slow links heads are traded, which sends fewer bytes; and what was asked for stays.
	if cfg, _ := decided(t, slow, h200, 8); cfg.Parallel.Algorithm == "ring" {
		t.Errorf("with slow links: %+v", cfg.Parallel)
	}
	cfg, chosen = decided(t, slow, h200, 8, "parallel.algorithm=ring", "parallel.layout=striped", "parallel.context=4", "parallel.data=2", "train.global_batch_size=2")
	if p := cfg.Parallel; p.Algorithm != "ring" || p.Layout != "striped" || p.Context != 4 || p.Data != 2 || len(chosen.Groups) != 1 {
		t.Errorf("asked for a striped ring of 4: %+v, %+v", p, chosen)
	}
	if cfg, chosen := decided(t, slow, h200, 8, "parallel.algorithm=hierarchical"); cfg.Parallel.Inner < 2 || len(chosen.Layers[0].Ranked) < 2 {
		t.Errorf("hierarchical: %+v", cfg.Parallel)
	}
}

// Eight samples on eight ranks need no transfers where each has its own, if one device has room for a whole one.
func TestDecideSizesOfGroups(t *testing.T) {
	slow := flat{pair: 1e-12, byte: 1e-9, start: 1e-5}
	set := []string{"train.global_batch_size=8", "data.seq_len=4K"}
	cfg, chosen := decided(t, slow, h200, 8, set...)
	if cfg.Parallel.Data != 8 || len(chosen.Groups) != 4 || chosen.Groups[0].TooLarge {
		t.Errorf("%+v, %+v", cfg.Parallel, chosen.Groups)
	}
	small := h200
	small.Memory = 40 << 30
	cfg, chosen = decided(t, slow, small, 8, "train.global_batch_size=8", "data.seq_len=128K")
	if cfg.Parallel.Data == 8 || chosen.Groups[0].TooLarge {
		t.Errorf("40 GiB: %+v, %+v", cfg.Parallel, chosen.Groups)
	}
}

func TestPlanTellsOfTheChoice(t *testing.T) {
	cfg, chosen := decided(t, flat{pair: 1e-12, byte: 1 / 450e9, start: 1e-5}, h200, 8)
	p, err := Make(cfg, 8, Options{Machine: h200, Chosen: chosen})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := written(&b, p); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"choice      by the costs", "28 layers without a window: ", "layouts, all layers: ", " more\n", "contiguous"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	var back struct {
		Choice struct {
			Layers []struct {
				Ranked []struct {
					Algorithm string
					Seconds   float64
				}
			}
		}
	}
	if err := json.Unmarshal(text, &back); err != nil || len(back.Choice.Layers) != 1 || back.Choice.Layers[0].Ranked[0].Seconds <= 0 {
		t.Errorf("%+v, %v", back, err)
	}
}

// A model with full and windowed layers: each kind gets its algorithm on a CPU, all ranks the same, and the plan tells.
func TestDecideForEachKind(t *testing.T) {
	hosts := machine.Machine{Hosts: 2}
	slow := flat{pair: 1e-12, byte: 1e-6, start: 1e-9}
	set := []string{"model.num_hidden_layers=4", "model.num_key_value_heads=24", "model.layer_types=[full_attention, sliding_attention, sliding_attention, sliding_attention]", "model.sliding_window=64", "data.seq_len=4K"}
	cfg, chosen := decided(t, slow, hosts, 4, set...)
	if chosen == nil || len(chosen.Kinds) != 1 {
		t.Fatalf("%+v, %+v", chosen, cfg.Parallel)
	}
	own := 0
	for _, l := range chosen.Layers {
		w, ok := chosen.Kinds[l.Window]
		if ok != l.Own || ok && (w != l.Ranked[0].Way || w.Layout != cfg.Parallel.Layout || w.Algorithm == cfg.Parallel.Algorithm) {
			t.Errorf("%+v by %+v, the config says %+v", l.Ranked[0], w, cfg.Parallel)
		}
		if ok {
			own++
		}
	}
	if _, again := decided(t, slow, hosts, 4, set...); own != 1 || !reflect.DeepEqual(chosen, again) {
		t.Errorf("%d kinds apart; again %+v", own, again)
	}
	p, err := Make(cfg, 4, Options{Machine: hosts, Chosen: chosen, Costs: Costs{Table: round(), Cores: 2}})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := written(&b, p); err != nil || !strings.Contains(b.String(), "these run by it, and others as the config says") {
		t.Errorf("%v in\n%s", err, b.String())
	}
	together, err := Make(cfg, 4, Options{Machine: hosts, Costs: Costs{Table: round(), Cores: 2}})
	if err != nil || together.Estimate.Parts.Transfers == p.Estimate.Parts.Transfers || together.Communication == p.Communication {
		t.Errorf("the plan counts what the config says of all: %+v", p.Estimate.Parts)
	}
	// Who asks for an algorithm gets it.
	if _, chosen := decided(t, slow, hosts, 4, append(set, "parallel.algorithm=ring")...); len(chosen.Kinds) > 0 {
		t.Errorf("a ring was asked for: %+v", chosen.Kinds)
	}
}

// On GPUs, too, if the backend of all layers takes the hops that a kind has by its own algorithm. Else that kind runs as the
// others do, and the plan says why.
func TestDecideForEachKindOnGPUs(t *testing.T) {
	const window = 3000 // keys, which are those of several ranks
	costs := flat{pair: 1e-12, byte: 1e-11, start: 1e-5}
	set := []string{"model.num_hidden_layers=4", "model.layer_types=[full_attention, sliding_attention, sliding_attention, sliding_attention]", "model.sliding_window=3000", "data.seq_len=8K"}
	gpus := machine.Machine{Arch: 103, GPUs: 8, Memory: 140 << 30, Flash: machine.BuiltFlash, CUDNN: backends.V(9, 20, 0), Assumed: true}
	planned := func() (*config.Config, *Chosen, *Plan, string) {
		t.Helper()
		cfg, chosen := decided(t, costs, gpus, 8, set...)
		choice, err := backend.ChooseByWindow(cfg, ByWindow(cfg, chosen.Apart()), gpus, 0)
		if err != nil || choice.Backend != backends.Fused {
			t.Fatalf("%+v, %v; want cuDNN, whose costs decided", choice, err)
		}
		cfg.Attention.Backend = choice.Backend.String()
		p, err := Make(cfg, 8, Options{Machine: gpus, Choice: choice, Chosen: chosen})
		var b bytes.Buffer
		if err == nil {
			err = written(&b, p)
		}
		if err != nil {
			t.Fatal(err)
		}
		return cfg, chosen, p, strings.Join(strings.Fields(b.String()), " ")
	}
	cfg, chosen, p, text := planned()
	w, ok := chosen.Kinds[window-1]
	if !ok || len(chosen.Kinds) != 1 || w.Algorithm != "allgather" || w.Backend != "fused" || cfg.Parallel.Algorithm == "allgather" {
		t.Fatalf("%v, all by %s", chosen.Kinds, cfg.Parallel.Algorithm)
	}
	if !strings.Contains(text, "these run by it, and others as the config says") || !strings.Contains(text, "algorithm "+cfg.Parallel.Algorithm+", forward, one layer") {
		t.Errorf("the plan does not tell of it:\n%s", text)
	}
	gpus.CUDNN = backends.V(9, 21, 0) // which hangs under all-gather there
	same, kept, alike, text := planned()
	windowed := kept.Layers[1]
	if len(kept.Kinds) > 0 || !windowed.Apart || len(windowed.Refused) != 1 || windowed.Refused[0].Rule != "fused-allgather-sm103-9.21" || kept.Seconds <= chosen.Seconds {
		t.Errorf("%+v in %g s, apart %g s", windowed, kept.Seconds, chosen.Seconds)
	}
	for _, want := range []string{"they run as the other layers do, since by it fused would not be their backend:", "fused-allgather-sm103-9.21 (layers with a window of 3000 keys): cuDNN 9.21 hangs"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if same.Parallel.Algorithm != cfg.Parallel.Algorithm || alike.Communication == p.Communication {
		t.Errorf("by %s as by %s: %+v", same.Parallel.Algorithm, cfg.Parallel.Algorithm, p.Communication)
	}
}

// Where no rule speaks against the backend that a kind would need, and auto takes another for the run, that is the reason.
func TestRefusedWithoutARule(t *testing.T) {
	cfg, _ := decided(t, nil, h200, 8)
	d := &Decider{Machine: h200}
	if ok, against, err := d.takes(cfg, nil, "flash"); !ok || len(against) > 0 || err != nil {
		t.Errorf("flash: %t, %+v, %v", ok, against, err)
	}
	ok, against, err := d.takes(cfg, nil, "reference")
	if ok || err != nil || len(against) != 1 || against[0].Rule != "" || !strings.HasPrefix(against[0].Reason, "auto takes flash, ") {
		t.Fatalf("the reference, which auto does not take: %t, %+v, %v", ok, against, err)
	}
	var b strings.Builder
	if (&LayerWays{Refused: against}).writeRefused(&b); !strings.Contains(b.String(), "by it reference would not be their backend:\n                auto takes flash, ") {
		t.Errorf("%s", b.String())
	}
}

// What layers of two kinds take is what a model takes that has the one kind, or one that has the other: they run one after another.
func TestKindsTakeTheirOwnMemory(t *testing.T) {
	m := machine.Machine{Arch: 90, GPUs: 4, Memory: 140 << 30, Flash: machine.BuiltFlash, CUDNN: backends.V(9, 19, 0)}
	memory := func(kinds map[int]planner.Way, set ...string) Memory {
		t.Helper()
		cfg, err := config.Load("../../examples/bench/llama-3.2-3b-32k.yaml", config.Options{
			Ranks: 4, Device: "cuda", NoFiles: true, Set: append(set, "model.num_hidden_layers=2", "parallel.layout=zigzag", "attention.backend=fused", "memory.recompute=none", "memory.loss_chunk=1024"),
		})
		if err != nil {
			t.Fatal(err)
		}
		mem, err := MemoryOfKinds(cfg, 4, m, kinds)
		if err != nil {
			t.Fatal(err)
		}
		if fitted, err := FitKinds(cfg, 4, m, kinds); err != nil || fitted != mem {
			t.Errorf("%v: FitKinds says %+v, %v; MemoryOfKinds %+v", kinds, fitted, err, mem)
		}
		return mem
	}
	const windows, mixed = "model.sliding_window=4096", "model.layer_types=[full_attention, sliding_attention]"
	for _, x := range [][2]string{{"ulysses", "allgather"}, {"ulysses", "ring"}, {"ring", "ulysses"}} {
		full := memory(nil, "parallel.algorithm="+x[0])
		windowed := memory(nil, "parallel.algorithm="+x[1], windows)
		both := memory(map[int]planner.Way{4095: {Algorithm: x[1]}}, "parallel.algorithm="+x[0], windows, mixed)
		if both.RingBuffers != max(full.RingBuffers, windowed.RingBuffers) || both.Workspace != max(full.Workspace, windowed.Workspace) || full.RingBuffers == windowed.RingBuffers || full.Workspace == windowed.Workspace {
			t.Errorf("full by %s: buffers %d, workspace %d; windows by %s: %d, %d; both: %d, %d", x[0], full.RingBuffers, full.Workspace,
				x[1], windowed.RingBuffers, windowed.Workspace, both.RingBuffers, both.Workspace)
		}
	}
}
