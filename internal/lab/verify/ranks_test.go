package verify

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// runSide runs one side on ranks of this process.
func runSide(t *testing.T, path string, ranks, whole int, set ...string) (*Side, *config.Config) {
	t.Helper()
	cfg := must.Have(config.Load(path, config.Options{Set: set, Ranks: ranks, Device: "cpu"}))
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
			dev := device.CPU(stream, "flash", tensor.F32)
			defer dev.Close()
			results[r], err = train.Verify(context.Background(), cfg, dev, world[r],
				train.Options{RunDir: dir, Room: mem.Room()}, train.Probing{Whole: whole, Leak: ranks > 1, Angles: ranks == 1})
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
	return s, cfg
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
