package train_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/internal/metrics"
	"github.com/cprun/cprun/internal/plan"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/train"
)

// Layers of a window that run by an algorithm of their own compute what they do under the config's, and send what that algorithm
// sends.
func TestKindsOfLayersRunApart(t *testing.T) {
	const ranks, window = 2, 9
	run := func(algorithm string, kinds map[int]planner.Way) []metrics.Step {
		cfg := load(t, tiny(t), ranks, "parallel.algorithm="+algorithm, "model.layer_types=[full_attention, sliding_attention]", "model.sliding_window=10")
		return mustRun(t, cfg, ranks, train.Options{Kinds: kinds}).steps
	}
	ring, ulysses := run("ring", nil), run("ulysses", nil)
	mixed := run("ring", map[int]planner.Way{window: {Algorithm: "ulysses"}})
	other := run("ulysses", map[int]planner.Way{window: {Algorithm: "ring"}})
	closeTo(t, "a window by ulysses", mixed, ring, 1e-5)
	closeTo(t, "a window by a ring", other, ring, 1e-5)
	for i := range ring {
		least, most := ring[i].AttentionBytes, ulysses[i].AttentionBytes // of the rank that sends most
		if a, b := mixed[i].AttentionBytes, other[i].AttentionBytes; min(a, b) <= least || max(a, b) >= most || a == b {
			t.Errorf("step %d: %v and %v bytes; all by a ring %v, all by ulysses %v", i, a, b, ring[i].AttentionBytes, ulysses[i].AttentionBytes)
		}
	}
	same := run("ring", map[int]planner.Way{window: {Algorithm: "ring"}, -1: {Algorithm: "ring"}})
	closeTo(t, "kinds that do as the config says", same, ring, 0)
}

// kindsCase is a run on GPUs in which windowed layers have an algorithm of their own.
type kindsCase struct {
	backend, full string
	windowed      planner.Way
	sends         bool // another number of bytes than if all ran by that of the full ones
}

var kindsCases = []kindsCase{
	{"flash", "ring", planner.Way{Algorithm: "allgather"}, false},
	{"flash", "ring", planner.Way{Algorithm: "allgather", Gather: "before"}, false},
	{"flash", "ring", planner.Way{Algorithm: "ulysses"}, true},
	{"flash", "ulysses", planner.Way{Algorithm: "ring"}, true},
	{"fused", "ring", planner.Way{Algorithm: "allgather"}, false},
	{"fused", "ring", planner.Way{Algorithm: "ulysses"}, true},
	{"fused", "ulysses", planner.Way{Algorithm: "ring"}, true},
	{"fused", "allgather", planner.Way{Algorithm: "hierarchical", Inner: 2}, true},
}

func (c kindsCase) String() string {
	return fmt.Sprintf("%s/full by %s, windows by %s %s", c.backend, c.full, c.windowed.Algorithm, c.windowed.When())
}

// kindsRanks is how many ranks they have, and kindsWindow the keys that a windowed layer sees.
const kindsRanks, kindsWindow = 2, 40

func (c kindsCase) set() []string {
	return []string{"precision.compute=bf16", "attention.backend=" + c.backend, "parallel.algorithm=" + c.full}
}

func (c kindsCase) kinds() map[int]planner.Way {
	return map[int]planner.Way{kindsWindow - 1: c.windowed}
}

// kindsYAML is a config of full and windowed layers.
func kindsYAML(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "text.txt")
	if err := os.WriteFile(path, []byte(strings.Repeat("the slings and arrows of outrageous fortune, or to take arms against a sea of troubles. ", 40)), 0o666); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`
model: {vocab_size: 257, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64,
  sliding_window: %d, layer_types: [full_attention, sliding_attention, sliding_attention, full_attention]}
data: {path: %s, seq_len: 256, eos_token_id: 256}
train: {steps: 5}
optimizer: {lr: 1.0e-3}
lr_schedule: {name: constant}
checkpoint: {async: false}
log: {tensorboard: false}
`, kindsWindow, path)
}

// A GPU takes every case, with the backend that it names for the hops of both kinds, so that a test there fails for what it tests; and
// a CPU computes the same by both algorithms.
func TestKindsCasesAreValid(t *testing.T) {
	m := machine.Machine{Arch: 90, CUDNN: backends.V(9, 19, 0), Flash: machine.BuiltFlash, GPUs: 1, Memory: 80 << 30}
	yaml := kindsYAML(t)
	want := mustRun(t, load(t, yaml, kindsRanks), kindsRanks, train.Options{}).steps
	for _, c := range kindsCases {
		cfg, err := config.Load(writeYAML(t, yaml), config.Options{Set: c.set(), Ranks: kindsRanks, Device: "cuda"})
		if err != nil {
			t.Errorf("%s: %v", c, err)
			continue
		}
		choice, err := backend.ChooseByWindow(cfg, plan.ByWindow(cfg, c.kinds()), m, 0)
		if err != nil || choice.Backend.String() != c.backend {
			t.Errorf("%s: %v", c, err)
		}
		if _, err := plan.FitKinds(cfg, kindsRanks, m, c.kinds()); err != nil {
			t.Errorf("%s: %v", c, err)
		}
		if c.backend == "fused" && testing.Short() {
			continue
		}
		closeTo(t, c.String(), mustRun(t, load(t, yaml, kindsRanks, "parallel.algorithm="+c.full), kindsRanks, train.Options{Kinds: c.kinds()}).steps, want, 1e-5)
	}
}
