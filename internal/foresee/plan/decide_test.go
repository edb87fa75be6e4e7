package plan

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// flat has the costs of a machine that computes each pair of positions of a head in the same time.
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
	cfg, err := config.Load("../../../examples/bench/llama-3.2-3b-32k.yaml", config.Options{
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
	if p := cfg.Parallel; chosen != nil || p.Algorithm != "ring" || p.Layout != "zigzag" || p.Context != 8 ||
		cfg.Parallel.Backend != "auto" {
		t.Errorf("%+v, %+v", chosen, p)
	}
}

func TestDecideFillsWhatIsOpen(t *testing.T) {
	fast, slow := flat{pair: 1e-12, byte: 1 / 450e9, start: 1e-5}, flat{pair: 1e-12, byte: 1e-9, start: 1e-5}
	cfg, chosen := decided(t, fast, h200, 8)
	if chosen == nil || cfg.Parallel.Layout != chosen.Strategies[0].Layout ||
		cfg.Parallel.Algorithm != chosen.Strategies[0].Algorithm {
		t.Fatalf("%+v, %+v", cfg.Parallel, chosen)
	}
	// With slow links ranks exchange heads, which sends fewer bytes; the user's choice stays.
	if cfg, _ := decided(t, slow, h200, 8); cfg.Parallel.Algorithm == "ring" {
		t.Errorf("with slow links: %+v", cfg.Parallel)
	}
	cfg, chosen = decided(t, slow, h200, 8, "parallel.algorithm=ring", "parallel.layout=striped", "parallel.context=4",
		"parallel.data=2", "train.global_batch_size=2")
	if p := cfg.Parallel; p.Algorithm != "ring" || p.Layout != "striped" || p.Context != 4 || p.Data != 2 ||
		len(chosen.Groups) != 1 {
		t.Errorf("asked for a striped ring of 4: %+v, %+v", p, chosen)
	}
	if cfg, chosen := decided(t, slow, h200, 8, "parallel.algorithm=hierarchical"); cfg.Parallel.Inner < 2 ||
		len(chosen.Strategies) < 2 {
		t.Errorf("hierarchical: %+v", cfg.Parallel)
	}
}

// If the memory is too small for the fastest strategy, a ring replaces it, and for nothing else.
func TestDecideTakesARingThatFits(t *testing.T) {
	slow := flat{pair: 1e-12, byte: 1e-9, start: 1e-5}
	set := []string{"data.seq_len=256K", "memory.recompute=selective", "memory.shard=gradients", "memory.offload=off",
		"memory.loss_chunk=1024"}
	total := func(more ...string) (*config.Config, int64) {
		cfg, _ := decided(t, slow, h200, 8, append(more, set...)...)
		m, err := Fit(cfg, 8, h200, nil)
		if err != nil {
			t.Fatal(err)
		}
		return cfg, m.Total
	}
	fastest, most := total()
	_, least := total("parallel.algorithm=ring")
	if fastest.Parallel.Algorithm == "ring" || least >= most {
		t.Fatalf("%s takes %d bytes, a ring %d", fastest.Parallel.Algorithm, most, least)
	}
	for memory, want := range map[int64]string{
		most * 105 / 100:           fastest.Parallel.Algorithm,
		(least + most) * 103 / 200: "ring",
		least / 2:                  "ring", // it lacks least
	} {
		small := h200
		small.Memory = memory
		cfg, chosen := decided(t, slow, small, 8, set...)
		if first := chosen.Strategies[0]; cfg.Parallel.Algorithm != want || first.Algorithm != want ||
			chosen.Groups[0].TooLarge != (memory == least/2) || len(chosen.Strategies) < 3 {
			t.Errorf("%d bytes: %s, %+v of %d, want %s", memory, cfg.Parallel.Algorithm, first, len(chosen.Strategies), want)
		}
		cfg, _ = decided(t, slow, small, 8, append(set, "parallel.algorithm="+fastest.Parallel.Algorithm)...)
		if cfg.Parallel.Algorithm != fastest.Parallel.Algorithm {
			t.Errorf("%d bytes: a given algorithm became %s", memory, cfg.Parallel.Algorithm)
		}
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
	cfg, chosen = decided(t, slow, small, 8, "train.global_batch_size=8", "data.seq_len=128K",
		"memory.recompute=selective")
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
	for _, want := range []string{"choice      by the costs", chosen.Strategies[0].String(), " more\n", "contiguous"} {
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
			Strategies []struct {
				Algorithm string
				Seconds   float64
			}
		}
	}
	if err := json.Unmarshal(text, &back); err != nil || len(back.Choice.Strategies) < 2 ||
		back.Choice.Strategies[0].Seconds <= 0 {
		t.Errorf("%+v, %v", back, err)
	}
}

// Layers of all windows run by one strategy, the one that takes least in all of them.
func TestDecideOnceForAllLayers(t *testing.T) {
	hosts := machine.Machine{Hosts: 2}
	slow := flat{pair: 1e-12, byte: 1e-6, start: 1e-9}
	cfg, chosen := decided(t, slow, hosts, 4, "model.num_hidden_layers=4", "model.num_key_value_heads=24",
		"data.seq_len=4K",
		"model.layer_types=[full_attention, sliding_attention, sliding_attention, sliding_attention]",
		"model.sliding_window=64")
	if chosen == nil || cfg.Parallel.Algorithm != chosen.Strategies[0].Algorithm ||
		cfg.Parallel.Layout != chosen.Strategies[0].Layout {
		t.Fatalf("%+v, %+v", chosen, cfg.Parallel)
	}
	requests := backend.Requests(cfg)
	if len(requests) != 2 || requests[0].Layers != 1 || requests[1].Layers != 3 ||
		requests[0].Strategy != requests[1].Strategy {
		t.Errorf("%+v", requests)
	}
}

// Where a rule rejects the backend of the fastest strategy, the fastest that the rules accept is the answer.
func TestDecideByCostsAndRules(t *testing.T) {
	costs := flat{pair: 1e-12, byte: 1e-11, start: 1e-5}
	set := []string{"model.num_hidden_layers=4", "model.sliding_window=3000", "data.seq_len=8K",
		"attention.backend=fused"}
	gpus := machine.Machine{Arch: 103, GPUs: 8, Memory: 140 << 30, Flash: machine.BuiltFlash, CUDNN: backends.V(9, 20,
		0), Assumed: true}
	cfg, free := decided(t, costs, gpus, 8, set...)
	if cfg.Parallel.Algorithm != "allgather" {
		t.Fatalf("%+v, want an all-gather, which 9.21 hangs under", free.Strategies[0])
	}
	gpus.CUDNN = backends.V(9, 21, 0)
	cfg, chosen := decided(t, costs, gpus, 8, set...)
	if cfg.Parallel.Algorithm == "allgather" || chosen.Strategies[0].Algorithm != cfg.Parallel.Algorithm ||
		chosen.Seconds <= free.Seconds {
		t.Errorf("%+v in %g s, before %g s", cfg.Parallel.Strategy, chosen.Seconds, free.Seconds)
	}
	if choice, err := backend.Choose(cfg, gpus, 0); err != nil || choice.Backend != backends.Fused {
		t.Errorf("%+v, %v", choice, err)
	}
}

// Costs are of causal self-attention, forward and backward, with documents of known lengths. All else goes by the
// rules.
func TestCostsAreOfPlainAttention(t *testing.T) {
	d := &Decider{Machine: h200, Costs: func(_, _ int) planner.Costs {
		return flat{pair: 1e-12, byte: 1 / 450e9,
			start: 1e-5}
	}}
	ask := func(docs []int, change func(r *backend.Request)) Answer {
		t.Helper()
		r := backend.Request{
			Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Gather: ring.Auto},
			Params: backends.Params{
				DType: tensor.BF16, Batch: 1, SeqQ: 4096, SeqKV: 4096, Heads: 8, KVHeads: 8, HeadDim: 64, HeadDimV: 64,
				Causal: true, WindowLeft: -1, Training: true, ContextSize: 4,
			},
		}
		change(&r)
		a, err := d.Strategy(Question{Attentions: []backend.Request{r}, Docs: docs, Ranks: 4, PerHost: 4})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	docs := []int{1000, 3096}
	for name, change := range map[string]func(r *backend.Request){
		"alone":     func(*backend.Request) {},
		"a window":  func(r *backend.Request) { r.WindowLeft = 100 },
		"documents": func(r *backend.Request) { r.Documents = true },
	} {
		given := docs
		if name != "documents" {
			given = nil
		}
		if a := ask(given, change); len(a.Ranked) == 0 || a.Ranked[0].Strategy != a.Strategy ||
			a.Predicted() != a.Ranked[0].Seconds {
			t.Errorf("%s: %+v", name, a)
		}
	}
	for name, change := range map[string]func(r *backend.Request){
		"no mask":             func(r *backend.Request) { r.Causal, r.WindowRight = false, -1 },
		"from the top left":   func(r *backend.Request) { r.TopLeft, r.SeqQ = true, 2048 },
		"cross attention":     func(r *backend.Request) { r.SeqKV = 8192 },
		"softcap":             func(r *backend.Request) { r.Softcap = true },
		"a sink":              func(r *backend.Request) { r.Sink = true },
		"forward":             func(r *backend.Request) { r.Training = false },
		"unknown documents":   func(r *backend.Request) { r.Documents = true },
		"documents' own keys": func(r *backend.Request) { r.Documents, r.DocumentKeys = true, true },
	} {
		if a := ask(nil, change); len(a.Ranked) > 0 || a.Strategy.Algorithm != "ring" || a.Predicted() != 0 {
			t.Errorf("%s: %+v", name, a)
		}
	}
}
