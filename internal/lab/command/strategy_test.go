package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/attend"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// An asked is an attention to run with every command.
type asked struct {
	machine  string // in the form of --assume
	ranks    int
	window   int // visible keys before a query; -1: all
	packed   bool
	strategy ring.Strategy // the user's settings
	costs    func(m machine.Machine, ranks, perHost int) planner.Costs
	backend  string // expected everywhere; "": by the machine's table
}

const (
	askedTokens, askedHeads, askedKVHeads, askedDim = 2048, 4, 2, 64
)

// yaml writes a config with that attention, and its data.
func (a *asked) yaml(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	var lines strings.Builder
	for i := range 60 {
		fmt.Fprintf(&lines, "{\"text\": %q}\n", strings.Repeat("the slings and arrows ", 1+i*7%11))
	}
	path := filepath.Join(dir, "train.yaml")
	text := fmt.Sprintf(`
model: {vocab_size: 257, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: %d,
  num_key_value_heads: %d, head_dim: %d}
data: {path: text.jsonl, seq_len: %d, eos_token_id: 256, pack_documents: %t}
train: {steps: 2}
`, askedHeads, askedKVHeads, askedDim, askedTokens, a.packed)
	for name, text := range map[string]string{"text.jsonl": lines.String(), "train.yaml": text} {
		must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
	}
	return path
}

// sets returns the config keys of the request.
func (a *asked) sets() (set []string) {
	for key, value := range map[string]string{"parallel.algorithm": a.strategy.Algorithm,
		"parallel.layout": string(a.strategy.Layout), "attention.backend": a.strategy.Backend} {
		if value != "" {
			set = append(set, key+"="+value)
		}
	}
	if a.window >= 0 {
		set = append(set, fmt.Sprintf("model.sliding_window=%d", a.window+1))
	}
	return set
}

// file writes the attention as input of cprun attention.
func (a *asked) file(t *testing.T, docs []int) string {
	t.Helper()
	entry := func(name string, heads int) safetensors.Entry {
		data := make([]float32, askedTokens*heads*askedDim)
		for i := range data {
			data[i] = 1
		}
		return safetensors.Floats(name, safetensors.F32, []int{1, askedTokens, heads, askedDim}, data)
	}
	meta := map[string]string{"causal": "true"}
	if a.window >= 0 {
		meta["window"] = fmt.Sprint(a.window)
	}
	if docs != nil {
		text := must.Have(json.Marshal(docs))
		meta["docs"] = string(text)
	}
	path := filepath.Join(t.TempDir(), "case.safetensors")
	must.Do(t, safetensors.WriteFile(path, meta, []safetensors.Entry{entry("q", askedHeads), entry("k", askedKVHeads),
		entry("v", askedKVHeads), entry("dout", askedHeads)}))
	return path
}

// comparable clears the fields of a strategy that have no effect.
func comparable(s ring.Strategy) ring.Strategy {
	if s.Gather = s.When(); s.Algorithm != "allgather" {
		s.Gather = ""
	}
	return s
}

// Training, cprun plan, bench attention and attention choose the same strategy for the same attention.
func TestCommandsChooseOneStrategy(t *testing.T) {
	pairs, cudnn := costsOf(perPair{}), costsOf(slowFlash{})
	const h100, h200 = "gpu=h100,cudnn=9.19.0,gpus=%d", "gpu=h200,cudnn=9.19.0,gpus=%d"
	for _, a := range []asked{
		{machine: h200, ranks: 1, window: -1},
		{machine: h200, ranks: 2, window: -1},
		{machine: h200, ranks: 8, window: -1},
		{machine: h200, ranks: 2, window: 511},
		{machine: h200, ranks: 2, window: -1, packed: true},
		{machine: h200, ranks: 4, window: -1, strategy: ring.Strategy{Algorithm: "ring", Layout: "zigzag"}},
		{machine: h200, ranks: 4, window: -1, strategy: ring.Strategy{Algorithm: "hierarchical"}},
		{machine: h200, ranks: 4, window: -1, strategy: ring.Strategy{Algorithm: "allgather"}},
		{machine: h200, ranks: 2, window: -1, strategy: ring.Strategy{Backend: "fused"}, backend: "fused"},
		{machine: h200, ranks: 2, window: -1, costs: cudnn, backend: "fused"},
		{machine: h200, ranks: 2, window: 511, costs: cudnn, packed: true, backend: "flash"}, // cuDNN has no such tiles
		{machine: h100, ranks: 1, window: -1, backend: "flash"},
		{machine: h100, ranks: 2, window: -1, backend: "flash"},
		{machine: h100, ranks: 2, window: 511, backend: "flash"},
		{machine: h100, ranks: 8, window: -1, packed: true, backend: "flash"},
		{machine: "", ranks: 1, window: -1, backend: "flash"},
		{machine: "", ranks: 2, window: -1, packed: true, backend: "flash"},
		{machine: "", ranks: 2, window: 511, costs: pairs, backend: "flash"},
		{machine: "", ranks: 4, window: -1, costs: pairs, packed: true, backend: "flash"},
		{machine: "", ranks: 2, window: -1, strategy: ring.Strategy{Backend: "reference"}, backend: "reference"},
	} {
		if a.costs == nil && a.machine == "" {
			a.costs = costsOf(nil) // ignore this machine's table
		}
		a.same(t)
	}
}

// same compares the choices of all commands.
func (a *asked) same(t *testing.T) {
	t.Helper()
	m, o := machine.CPU(), Options{NProc: fmt.Sprint(a.ranks), Device: "auto", NodeRank: -1, LogLevel: "info",
		Stderr: os.Stderr, Costs: a.costs}
	var assume []string
	if a.machine != "" {
		assume = []string{fmt.Sprintf(a.machine, a.ranks)}
		m = assumed(t, assume[0])
	}
	o.machine = m
	path, got := a.yaml(t), map[string]ring.Strategy{}

	training := TrainOptions{Options: o, Set: a.sets(), Resume: "never"}
	r, err := training.checkInput(t.Context(), path, a.ranks)
	if err != nil {
		t.Fatalf("%+v: %v", *a, err)
	}
	got["training"] = r.cfg.Parallel.Strategy

	var out bytes.Buffer
	planning := PlanOptions{Options: o, Set: a.sets(), Assume: assume, JSON: true}
	if planning.Stdout = &out; m.IsCPU() {
		planning.Device = "cpu"
	}
	if _, err := Plan(path, planning); err != nil {
		t.Fatalf("%+v: %v", *a, err)
	}
	var p struct {
		Config struct {
			Parallel struct {
				Layout, Algorithm string
				Inner             any `json:"ulysses_degree"`
				GatherHeads       int `json:"gather_heads"`
				Gather            string
			}
			Attention struct{ Backend string }
		}
	}
	must.Do(t, json.Unmarshal(out.Bytes(), &p))
	planned := ring.Strategy{Layout: partition.LayoutName(p.Config.Parallel.Layout),
		Algorithm: p.Config.Parallel.Algorithm, GatherHeads: p.Config.Parallel.GatherHeads,
		Gather: p.Config.Parallel.Gather, Backend: p.Config.Attention.Backend}
	if n, ok := p.Config.Parallel.Inner.(float64); ok {
		planned.Inner = int(n)
	}
	got["cprun plan"] = planned

	var docs []int
	task := bench.Task{Machine: m, Attention: &bench.AttentionSpec{
		Seq: []int{askedTokens}, Heads: askedHeads, KVHeads: askedKVHeads, HeadDim: askedDim, Causal: true,
		Window: a.window, DType: "auto", Gathers: []string{ring.Auto},
		Layouts: []string{word(string(a.strategy.Layout))}, Algorithms: []string{word(a.strategy.Algorithm)},
		Backend: word(a.strategy.Backend),
	}}
	if a.packed {
		cfg := must.Have(config.Load(path, config.Options{Ranks: a.ranks, Device: m.Device()}))
		if docs = documents(cfg); len(docs) < 2 {
			t.Fatalf("documents %v", docs)
		}
		task.Attention.Documents, task.Attention.Packs = "packs.json", [][]int{docs}
	}
	task.Attention.Default(m.Device(), a.ranks)
	if err := (&BenchOptions{Options: o}).chooseRows(&task, a.ranks); err != nil {
		t.Fatalf("%+v: %v", *a, err)
	}
	got["bench attention"] = task.Attention.Rows[0].Strategy

	c := must.Have(attend.Open(a.file(t, docs)))
	defer c.Close()
	spec := attend.Spec{Strategy: a.strategy, DType: task.Attention.DType, Device: m.Device(), Machine: m}
	if spec.Gather = ring.Auto; spec.Backend == "" {
		spec.Backend = "auto"
	}
	if _, err := o.chooseFor(&spec, c, a.ranks); err != nil {
		t.Fatalf("%+v: %v", *a, err)
	}
	got["attention"] = spec.Strategy

	want := comparable(got["training"])
	if a.backend != "" && want.Backend != a.backend {
		t.Errorf("%s, %d ranks, window %d, packed %t: training takes %s, want %s", a.machine, a.ranks, a.window,
			a.packed, want, a.backend)
	}
	for command, s := range got {
		if s = comparable(s); s != want {
			t.Errorf("%s, %d ranks, window %d, packed %t: %s takes %+v, training %+v", a.machine, a.ranks, a.window,
				a.packed, command, s, want)
		}
	}
}

// word formats a field as a flag value.
func word(field string) string {
	if field == "" {
		return "auto"
	}
	return field
}

// On Hopper, flash is faster than cuDNN at every measured length, and auto chooses it.
func TestFlashOnHopper(t *testing.T) {
	specs := []bench.AttentionSpec{
		{Seq: []int{16 << 10, 32 << 10, 128 << 10}, Window: -1},
		{Seq: []int{32 << 10}, Window: -1, Deterministic: true},
		{Seq: []int{64 << 10}, Window: 4095},
		{Documents: "magi", PackCount: 1, Seq: []int{16 << 10}, Heads: 64, KVHeads: 8, Window: -1},
		{Documents: "magi", PackCount: 1, Seq: []int{64 << 10}, Heads: 64, KVHeads: 8, Window: -1},
	}
	for _, s := range specs {
		must.Do(t, s.Load())
		for _, gpu := range []string{"h100", "h200"} {
			m := assumed(t, "gpu="+gpu+",cudnn=9.19.0,gpus=2")
			o := BenchOptions{Options: Options{Stderr: os.Stderr}}
			for _, algorithm := range []string{"ring", "allgather", "auto"} {
				s := s
				s.Causal, s.DType, s.Backend, s.Algorithms, s.Gathers = true, "auto", "auto", []string{algorithm},
					[]string{ring.Auto}
				s.Default("cuda", 2)
				must.Do(t, o.chooseRows(&bench.Task{Machine: m, Attention: &s}, 2))
				if s.Backend != "flash" || len(s.Rows) != len(s.Seq) {
					t.Errorf("%s, %v tokens, window %d, documents %q, %s: %+v", gpu, s.Seq, s.Window, s.Documents,
						algorithm, s.Rows)
				}
			}
		}
	}
}

// longFused implements planner.Costs for a machine on which flash is faster for short calls, and cuDNN for long ones.
type longFused struct{ perPair }

func (l longFused) Call(c planner.Call) float64 {
	pairs := partition.Pairs(c.Tiles)
	if (c.Backend == "fused") == (pairs > 1<<24) {
		return l.perPair.Call(c)
	}
	return 2 * l.perPair.Call(c)
}

// If rows prefer different backends, all get the backend of the longest row.
func TestRowsShareABackend(t *testing.T) {
	m := assumed(t, "gpu=h200,cudnn=9.19.0,gpus=2")
	o := BenchOptions{Options: Options{Stderr: os.Stderr, Costs: costsOf(longFused{})}}
	for want, lengths := range map[string][]int{"flash": {2 << 10, 4 << 10}, "fused": {2 << 10, 64 << 10}} {
		s := bench.AttentionSpec{
			Seq: lengths, Causal: true, Window: -1, DType: "auto", Backend: "auto",
			Algorithms: []string{"ring", "ulysses"}, Gathers: []string{ring.Auto},
		}
		s.Default("cuda", 2)
		must.Do(t, o.chooseRows(&bench.Task{Machine: m, Attention: &s}, 2))
		if len(s.Rows) != 4 || s.Backend != want {
			t.Errorf("%v tokens: %s, %v", lengths, s.Backend, s.Rows)
		}
		for _, w := range s.Rows {
			if w.Backend != want {
				t.Errorf("%v tokens: %v", lengths, w)
			}
		}
	}
}

// cprun eval chooses by costs, like training.
func TestEvalGoesByCosts(t *testing.T) {
	m := assumed(t, "gpu=h200,cudnn=9.19.0,gpus=2")
	const dir = "../../model/testdata/parity/tiny-llama"
	for want, costs := range map[string]planner.Costs{"flash": nil, "fused": slowFlash{}} {
		o := EvalOptions{Data: dir + "/tokens.bin", SeqLen: "64", Options: Options{Stderr: os.Stderr, machine: m}}
		o.Costs = costsOf(costs)
		var e evaluation
		var task job.Train
		cfg, _, err := o.prepare(t.Context(), dir, 2, &e, &task)
		if err != nil {
			t.Fatal(err)
		}
		if cfg.Parallel.Backend != want {
			t.Errorf("%+v, want %s", cfg.Parallel.Strategy, want)
		}
	}
}
