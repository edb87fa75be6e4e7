package train_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
)

const loraDir = "../../model/testdata/lora"

// A tuned is a run of the fixtures, with its flags.
type tuned struct {
	name string // of the curve
	set  []string
	base string // directory of the model
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
	baseOf := func(name string) string {
		var of struct{ Base string }
		if err := json.Unmarshal(all[name], &of); err != nil {
			t.Fatal(err)
		}
		return "../" + of.Base
	}
	grown := []string{"model.resize_embeddings=100", "data.path=" + absolute(filepath.Join(loraDir, "resized.bin"))}
	for _, name := range []string{"all", "subset", "phi3", "patterns", "tied", "experts", "mixtral", "gemma4", "resized"} {
		set := []string{"lora.from=" + absolute(filepath.Join(loraDir, name))}
		if name == "resized" {
			set = append(set, grown...)
		}
		runs = append(runs, tuned{name, set, baseOf(name)})
	}
	runs = append(runs, tuned{"grown", grown, baseOf("grown")})
	globs, err := json.Marshal(frozen.Frozen)
	if err != nil {
		t.Fatal(err)
	}
	return append(runs, tuned{"freeze", []string{"train.freeze=" + string(globs)}, baseOf("freeze")}), func(name string) expect {
		e := common
		if err := json.Unmarshal(all[name], &e); err != nil {
			t.Fatal(err)
		}
		if testing.Short() {
			e = e.begin(shortSteps)
		}
		return e
	}
}

func loadTuned(t *testing.T, run tuned, e expect, ranks int, set ...string) *config.Config {
	t.Helper()
	return load(t, parityYAML(run.base, e), ranks, slices.Concat(run.set, set)...)
}

// tunedCurve works like curve.
func tunedCurve(t *testing.T, run tuned, e expect, ranks int, set ...string) []metrics.Step {
	t.Helper()
	return curve(t, parityYAML(run.base, e), ranks, slices.Concat(run.set, set)...)
}

// Adapters of PEFT (of all linear layers, of a subset with rslora, of matrices that files join, with patterns and modules
// to save, with a tied embedding to save, of experts and routers, of a resized model), a resized model and one with
// frozen parameters follow the curves of plain PyTorch training within 1e-5 of the loss, with the state of the model
// whole, in parts and on the host.
func TestAdaptersFollowPEFT(t *testing.T) {
	t.Parallel()
	runs, expected := loraCurves(t)
	for r, run := range runs {
		e := expected(run.name)
		for i, c := range []struct {
			ranks int
			set   []string
		}{
			{1, []string{"memory.recompute=full"}},
			{4, nil},
			{4, []string{"memory.shard=parameters", "memory.recompute=selective"}},
			{2, []string{"memory.shard=parameters", "memory.offload=both"}},
		} {
			if testing.Short() && r > 0 && i%2 != r%2 {
				continue // one run in all ways, the others in two, in turn
			}
			cfg := loadTuned(t, run, e, c.ranks, c.set...)
			if n := model.Count(model.Layout(&cfg.Model.Config)); n != e.Trained {
				t.Errorf("%s: %d parameters train, want %d", run.name, n, e.Trained)
			}
			what := fmt.Sprintf("%s, %d ranks, %v", run.name, c.ranks, c.set)
			got := tunedCurve(t, run, e, c.ranks, c.set...)
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
	t.Parallel()
	runs, expected := loraCurves(t)
	e := expected("all").begin(shortSteps)
	curveOf := func(ranks int, set ...string) []metrics.Step {
		return tunedCurve(t, runs[0], e, ranks, append([]string{"lora.dropout=0.3", "data.seq_len=128"}, set...)...)
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

// Dropout drops other elements in each step, and for another seed: without updates, the loss of a batch changes.
func TestDropoutOfSteps(t *testing.T) {
	runs, expected := loraCurves(t)
	path := writeFile(t, "one.jsonl", `{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}`)
	seen := map[metrics.Float]bool{}
	for _, seed := range []string{"train.seed=1", "train.seed=2"} {
		for _, s := range tunedCurve(t, runs[0], expected("all").begin(shortSteps), 1, "data.path="+path, "data.seq_len=14",
			"train.steps=3", "optimizer.lr=0", "lora.dropout=0.3", "data.seed=1", seed) {
			seen[s.Loss] = true
		}
	}
	if len(seen) != 6 {
		t.Errorf("two runs of three steps over one batch have %d losses, want 6: %v", len(seen), seen)
	}
}

// Tensors of an adapter that do not fit are found before a process starts.
func TestAdaptersThatDoNotFitAreRefused(t *testing.T) {
	runs, expected := loraCurves(t)
	dir := filepath.Join(t.TempDir(), "adapter")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(loraDir, "subset"))); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "adapter_config.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	runs[1].set = []string{"lora.from=" + dir}
	for _, r := range []string{`"r": 3`, `"r": 2`} {
		if err := os.WriteFile(path, []byte(strings.Replace(string(text), `"r": 3`, r, 1)), 0o666); err != nil {
			t.Fatal(err)
		}
		_, err := train.Check(loadTuned(t, runs[1], expected("subset"), 1))
		if fits := r == `"r": 3`; fits != (err == nil) || !fits && !strings.Contains(err.Error(), "lora.from: ") {
			t.Errorf("%s: %v", r, err)
		}
	}
}

// A run resumes with the same bits, trained and frozen, and its merged weights are W + scale * B A.
func TestTunedRunsResumeAndMerge(t *testing.T) {
	t.Parallel()
	runs, expected := loraCurves(t)
	for r, run := range runs {
		e := expected(run.name)
		e.Steps = 4
		for i, c := range []struct {
			ranks int
			set   []string
		}{{1, nil}, {2, []string{"memory.shard=parameters", "memory.offload=optimizer"}}} {
			if testing.Short() && i != r%2 {
				continue // whole or in parts, in turn
			}
			set := append(c.set, "checkpoint.every=2", "train.deterministic=true")
			cfg, dir := loadTuned(t, run, e, c.ranks, set...), t.TempDir()
			cfg.Train.Steps = 2
			first := mustRun(t, cfg, c.ranks, train.Options{RunDir: dir, RunID: "a"}).steps
			cfg.Train.Steps = 4
			rest := mustRun(t, cfg, c.ranks, train.Options{RunDir: dir, RunID: "b", Resume: true}).steps
			want := tunedCurve(t, run, e, c.ranks, set...)
			if got := losses(append(first, rest...)); got != losses(want) {
				t.Errorf("%s, %d ranks: losses\n%s\nof a resumed run, want\n%s", run.name, c.ranks, got, losses(want))
			}
			checkMerged(t, cfg, dir)
		}
	}
}

// checkMerged compares the merged matrices of a run with its base and the adapters of its checkpoint, in float64.
func checkMerged(t *testing.T, cfg *config.Config, dir string) {
	t.Helper()
	c, _, err := checkpoint.Latest(t.Context(), filepath.Join(dir, "checkpoints"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	initial, err := train.NewInitial(cfg, true)
	if err != nil {
		t.Fatal(err)
	}
	defer initial.Close()
	if err := initial.Matches(t.Context(), c); err != nil {
		t.Error(err)
	}
	base, err := hf.OpenWeights(cfg.Model.From)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	merged := initial.Saved(t.Context(), c, true)
	saved := map[string]bool{}
	for _, p := range c.Manifest.Params {
		saved[p.Name] = true
	}
	for _, m := range cfg.Model.Tensors() {
		n := 1
		for _, d := range m.Shape {
			n *= d
		}
		got, want := make([]float32, n), make([]float32, n)
		for lo := 0; lo < n; lo += 100 { // not at the ends of rows
			if err := merged(m, int64(lo), got[lo:min(n, lo+100)]); err != nil {
				t.Fatal(err)
			}
		}
		if l := cfg.Model.Tuning.LoRA; l != nil && l.From != "" && m.FileRows > 0 {
			readAdapter(t, l.From, hf.InAdapter(m), want)
		} else if err := base.Read(m, want, 0); err != nil {
			t.Fatal(err)
		}
		if saved[m.Name] {
			if err := c.Read(t.Context(), m.Name, checkpoint.FieldParam, 0, want); err != nil {
				t.Fatal(err)
			}
		}
		matrix, row, rows := m.Matrix()
		module := "base_model.model." + strings.TrimSuffix(matrix, "weight")
		if l := cfg.Model.Tuning.LoRA; l != nil && saved[module+"lora_A.weight"] {
			in, r, experts := m.Shape[1], l.Rank(strings.TrimSuffix(matrix, ".weight")), max(m.Experts, 1)
			a, b := make([]float32, experts*r*in), make([]float32, experts*rows*r)
			for name, to := range map[string][]float32{"lora_A.weight": a, "lora_B.weight": b} {
				if err := c.Read(t.Context(), module+name, checkpoint.FieldParam, 0, to); err != nil {
					t.Fatal(err)
				}
			}
			for i := range want {
				sum := 0.0
				for k := range r {
					sum += l.Scale(matrix) * float64(b[(row+i/in)*r+k]) * float64(a[(i/in/rows*r+k)*in+i%in])
				}
				want[i] = float32(float64(want[i]) + sum)
			}
		}
		if err := near.Within(got, want, near.Finite, 1e-7); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
	}
}

func readAdapter(t *testing.T, path string, of hf.Tensor, dst []float32) {
	t.Helper()
	w, err := hf.OpenAdapter(path)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Read(of, dst, 0); err != nil {
		t.Fatal(err)
	}
}
