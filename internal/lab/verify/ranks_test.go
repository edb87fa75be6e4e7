package verify

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// runSide runs one side on ranks of this process.
func runSide(t *testing.T, path string, ranks, whole int, set ...string) (*Side, *config.Config) {
	t.Helper()
	cfg := must.Have(config.Load(path, config.Options{Set: set, Ranks: ranks, Device: "cpu"}))
	return runConfig(t, cfg, ranks, train.Probing{Whole: whole, Leak: ranks > 1, Angles: ranks == 1}), cfg
}

func runConfig(t *testing.T, cfg *config.Config, ranks int, p train.Probing) *Side {
	t.Helper()
	mem := must.Have(plan.Fit(cfg, ranks, machine.Machine{}, nil))
	compute := make([]tensor.Stream, ranks)
	for r := range ranks {
		compute[r] = tensor.NewHostStream("compute")
	}
	world, dir := comm.NewLocal(ranks, compute, comm.Options{}), t.TempDir()
	results := make([]train.Verified, ranks)
	var g errgroup.Group
	for r := range ranks {
		g.Go(func() (err error) {
			stream := compute[r].(*tensor.HostStream)
			defer stream.Close()
			defer world[r].Close()
			dev := device.CPU(stream, "flash", backend.DType(cfg))
			defer dev.Close()
			results[r], err = train.Verify(context.Background(), cfg, dev, world[r],
				train.Options{RunDir: dir, Room: mem.Room()}, p)
			if err != nil {
				world[r].Abort(err)
				return err
			}
			return world[r].Barrier(context.Background())
		})
	}
	must.Do(t, g.Wait())
	s := must.Have(Open(dir, ranks, results[0], cfg.Data.SeqLen))
	t.Cleanup(func() { s.Close() })
	return s
}

// Both sides may take prefixes of the samples, and groups of ranks whole batches of their own.
func TestPrefixesOfSamples(t *testing.T) {
	t.Parallel()
	text := must.Have(filepath.Abs("../../../examples/data/gettysburg.txt"))
	path := writeFile(t, "train.yaml", fmt.Sprintf("model: {vocab_size: 256, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "+
		"num_attention_heads: 2}\ndata: {path: %s, seq_len: 96}\ntrain: {steps: 1, global_batch_size: 4}\n"+
		"optimizer: {lr: 1.0e-3}\n", text))
	for _, c := range []struct{ length, tokens int }{{96, 384}, {40, 160}} {
		length := fmt.Sprintf("data.seq_len=%d", c.length)
		one, _ := runSide(t, path, 1, 96, length)
		many, cfg := runSide(t, path, 4, 96, length, "parallel.context=2", "memory.shard=gradients")
		r := &Report{Compute: "fp32", Ranks: 4}
		must.Do(t, Compare(r, cfg, 96, one, many))
		if !*r.OK || r.CheckedTokens != c.tokens || r.BatchTokens != 384 || r.Targets.Records != c.tokens ||
			len(r.Leak.Probes) != 3 || r.Leak.Changed == 0 {
			t.Errorf("%d tokens of a sample: %+v, %+v", c.length, r, r.Leak)
		}
		if r.Rope.Layers != 2 || len(r.Step.Samples) != 8 || len(r.Step.Parameters) != len(r.Gradients) {
			t.Errorf("%d tokens of a sample: %+v, %+v", c.length, r.Rope, r.Step)
		}
		cfg.Model.RopeTheta *= 2 // the keys are turned by another base
		if r.compareRope(cfg, one); len(r.Differences) != 2 {
			t.Errorf("another rotary base: %v", r.Differences)
		}
		keys := []string{"a=b"}
		if err := CompareVaried(r, cfg, keys, one, many); err != nil || !slices.Equal(r.Varied, keys) || *r.OK {
			t.Errorf("%+v, %v", r, err)
		}
	}
}

// Keys of gemma4 are checked in layers with a window and without, which rotate a part of their pairs.
func TestRopeOfTwoKindsOfLayers(t *testing.T) {
	t.Parallel()
	dir := must.Have(filepath.Abs("../../model/testdata/families/gemma4_text-dense"))
	path := writeFile(t, "train.yaml", fmt.Sprintf("model: {from: %s}\ndata: {path: %s/tokens.bin, seq_len: 96}\n"+
		"train: {steps: 1, global_batch_size: 1}\noptimizer: {lr: 1.0e-3}\n", dir, dir))
	one, cfg := runSide(t, path, 1, 96)
	for _, c := range []struct {
		change func(*hf.Config)
		wrong  int // layers
	}{
		{func(*hf.Config) {}, 0}, {func(m *hf.Config) { m.RopeLocalBaseFreq *= 2 }, 4},
		{func(m *hf.Config) { m.RopeTheta /= 100 }, 2}, {func(m *hf.Config) { m.PartialRotaryFactor *= 2 }, 2},
	} {
		changed := *cfg
		c.change(&changed.Model.Config)
		r := &Report{Compute: "fp32", Ranks: 1, Reasons: map[string]string{}}
		if r.compareRope(&changed, one); r.Rope == nil || r.Rope.Layers != 6 || len(r.Differences) != c.wrong {
			t.Errorf("%+v, %v, %v, want %d wrong layers", r.Rope, r.Reasons, r.Differences, c.wrong)
		}
	}
}

// Keys of layers above a recurrent one are checked too, in documents and without.
func TestRopeAboveRecurrentLayers(t *testing.T) {
	t.Parallel()
	text := must.Have(filepath.Abs("../../../examples/data/gettysburg.txt"))
	path := writeFile(t, "train.yaml", fmt.Sprintf("model: {architecture: qwen3_5_text, vocab_size: 256, hidden_size: 16, "+
		"intermediate_size: 24, num_hidden_layers: 3, layer_types: [full_attention, linear_attention, full_attention], "+
		"num_attention_heads: 2, head_dim: 16, linear_num_key_heads: 2, linear_num_value_heads: 2}\n"+
		"data: {path: %s, seq_len: 96}\ntrain: {steps: 1, global_batch_size: 2}\noptimizer: {lr: 1.0e-3}\n", text))
	for _, packed := range []bool{false, true} {
		one, cfg := runSide(t, path, 1, 96, fmt.Sprintf("data.pack_documents=%t", packed))
		r := &Report{Compute: "fp32", Ranks: 1, Reasons: map[string]string{}}
		if r.compareRope(cfg, one); r.Rope == nil || r.Rope.Layers != 2 || !(r.Rope.Error < 1e-5) || len(r.Differences) > 0 {
			t.Errorf("packed %t: %+v, %v, %v", packed, r.Rope, r.Reasons, r.Differences)
		}
		cfg.Model.RopeTheta *= 2
		if r.compareRope(cfg, one); len(r.Differences) != 2 {
			t.Errorf("packed %t, another rotary base: %v", packed, r.Differences)
		}
	}
}

// Right results of linears in FP8 are within the tolerances, in fresh models of all families: the directories of
// model.from have no weights.
func TestLinearsOfFamilies(t *testing.T) {
	t.Parallel()
	dirs := must.Have(filepath.Glob("../../model/testdata/families/*"))
	if len(dirs) < 20 {
		t.Fatalf("%d families", len(dirs))
	}
	for i, dir := range dirs {
		if testing.Short() && i%4 != 0 {
			continue
		}
		var model map[string]any
		must.Do(t, json.Unmarshal(must.Have(os.ReadFile(filepath.Join(dir, "config.json"))), &model))
		for key, width := range model { // multiples of 16
			if n, ok := width.(float64); ok && strings.HasSuffix(key, "intermediate_size") {
				model[key] = 16 * math.Ceil(n/16)
			} else if strings.HasSuffix(key, "head_dim") {
				model[key] = 16
			}
		}
		from := filepath.Dir(writeFile(t, "config.json", string(must.Have(json.Marshal(model)))))
		path := writeFile(t, "train.yaml", fmt.Sprintf("model: {from: %s}\ndata: {path: %s, seq_len: 128}\n"+
			"train: {steps: 1, global_batch_size: 1}\noptimizer: {lr: 1.0e-3}\n", from,
			must.Have(filepath.Abs(filepath.Join(dir, "tokens.bin")))))
		for _, compute := range []string{"precision.compute=fp32", "precision.compute=bf16"} {
			cfg := Fresh(must.Have(config.Load(path, config.Options{Set: []string{compute}, Ranks: 1, Device: "cpu"})))
			one := runConfig(t, cfg, 1, train.Probing{Whole: 128})
			cfg.Model.Tuning.Linears = "fp8"
			scaled := runConfig(t, cfg, 1, train.Probing{Whole: 128, Routes: one.Dir})
			r := &Report{}
			if err := CompareLinears(r, cfg, one, scaled); err != nil || !*r.OK || r.Linears.FP8 == r.Linears.Loss {
				t.Errorf("%s, %s: %v, %v, %+v", dir, compute, err, r.Differences, r.Linears)
			}
		}
	}
}
