package train_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
)

const (
	loraDir  = "../../model/testdata/lora"
	loraBase = "tiny-llama3-gqa"
)

// A tuned is a run of the fixtures, with its flags.
type tuned struct {
	name string // of the curve
	set  []string
}

// loraCurves returns the curves of scripts/oracle/lora.py.
func loraCurves(t *testing.T) (runs []tuned, curve func(name string) expect) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(loraDir, "curves.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]json.RawMessage
	var common expect
	var frozen struct{ Frozen []string }
	for _, v := range []any{&all, &common, &frozen} {
		if err := json.Unmarshal(text, v); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"all", "subset"} {
		runs = append(runs, tuned{name, []string{"lora.from=" + absolute(filepath.Join(loraDir, name))}})
	}
	globs, err := json.Marshal(frozen.Frozen)
	if err != nil {
		t.Fatal(err)
	}
	return append(runs, tuned{"freeze", []string{"train.freeze=" + string(globs)}}), func(name string) expect {
		e := common
		if err := json.Unmarshal(all[name], &e); err != nil {
			t.Fatal(err)
		}
		return e
	}
}

func loadTuned(t *testing.T, run tuned, e expect, ranks int, set ...string) *config.Config {
	t.Helper()
	return load(t, parityYAML(loraBase, e), ranks, slices.Concat(run.set, set)...)
}

// Adapters of PEFT, of all linear layers and of a subset with rslora, and a model with frozen parameters follow the
// curves of plain PyTorch training within 1e-5 of the loss, with the state of the model whole, in parts and on the host.
func TestAdaptersFollowPEFT(t *testing.T) {
	runs, curve := loraCurves(t)
	for _, run := range runs {
		e := curve(run.name)
		for _, c := range []struct {
			ranks int
			set   []string
		}{
			{1, []string{"memory.recompute=full"}},
			{4, nil},
			{4, []string{"memory.shard=parameters", "memory.recompute=selective"}},
			{2, []string{"memory.shard=parameters", "memory.offload=both"}},
		} {
			cfg := loadTuned(t, run, e, c.ranks, c.set...)
			what := fmt.Sprintf("%s, %d ranks, %v", run.name, c.ranks, c.set)
			got := mustRun(t, cfg, c.ranks, train.Options{}).steps
			follows(t, what, got, e, "fp32")
			for i, s := range got {
				if off := float64(s.Loss)/e.Loss[i] - 1; !(off < 1e-5 && off > -1e-5) {
					t.Errorf("%s: step %d has loss %v, want %v", what, i+1, s.Loss, e.Loss[i])
				}
			}
		}
	}
}

// Dropout drops the same elements on any number of ranks, in any layout, and in recomputed layers.
func TestDropoutOfRanks(t *testing.T) {
	runs, curve := loraCurves(t)
	e := curve("all").begin()
	curveOf := func(ranks int, set ...string) []metrics.Step {
		set = append([]string{"lora.dropout=0.3", "data.seq_len=128"}, set...)
		return mustRun(t, loadTuned(t, runs[0], e, ranks, set...), ranks, train.Options{}).steps
	}
	want := curveOf(1)
	for _, got := range [][]metrics.Step{
		curveOf(4, "parallel.layout=zigzag", "memory.recompute=full"),
		curveOf(3, "parallel.layout=striped", "memory.shard=parameters"),
	} {
		for i, s := range got {
			if off := float64(s.Loss/want[i].Loss) - 1; !(math.Abs(off) < 1e-6) {
				t.Errorf("step %d: loss %v, want %v of one rank", i+1, s.Loss, want[i].Loss)
			}
		}
	}
	plain := curveOf(1, "lora.dropout=0")
	if plain[0].Loss == want[0].Loss {
		t.Errorf("loss %v with and without dropout", plain[0].Loss)
	}
}
