package train

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// A counted is a store that counts allocations.
type counted struct {
	device.Store
	bytes atomic.Int64
}

func (c *counted) Alloc(n int64) (tensor.Memory, error) {
	c.bytes.Add(n)
	return c.Store.Alloc(n)
}

// onRanks creates a trainer on each of some ranks in this process, on changed devices that count, and calls f with it.
func onRanks(t *testing.T, ranks int, cfg *config.Config, room state.Room, change func(*device.Device),
	f func(tr *Trainer, c *counted) error) {
	t.Helper()
	err := Locally(ranks, "flash", backend.DType(cfg), 0, func(_ int, dev *Device, world *comm.Group) error {
		store := &counted{Store: dev.Store}
		dev.Store = store
		change(dev)
		tr, err := newTrainer(context.Background(), cfg, *dev, world, &Options{Room: room})
		if err == nil {
			err = f(tr, store)
		}
		if err == nil {
			err = tr.flush(context.Background()) // a rank that leaves would end transfers of the others
		}
		if err == nil {
			err = world.Barrier(context.Background())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// sumsBytes is the memory of a run that a plan does not list.
const sumsBytes = int64(8 * sumCount)

// The memory of the plan must equal the allocations of the run, to the byte.
func TestThePlanIsWhatARunTakes(t *testing.T) {
	t.Parallel()
	const ranks = 3
	for _, shard := range []string{"none", "optimizer", "gradients", "parameters"} {
		for _, compute := range []string{"fp32", "bf16"} {
			for _, packed := range []bool{false, true} {
				for _, recompute := range []string{"none", "selective", "full"} {
					set := []string{
						"data.seq_len=91", "train.micro_batch_size=2", "train.global_batch_size=2", "train.steps=20",
						"memory.shard=" + shard, "precision.compute=" + compute,
						fmt.Sprintf("data.pack_documents=%t", packed), "memory.recompute=" + recompute,
						"memory.loss_chunk=15",
					}
					checkPlan(t, ranks, !packed, set)
				}
			}
		}
	}
	recurs := "model={architecture: qwen3_5_text, layer_types: [linear_attention, full_attention, linear_attention]," +
		" head_dim: 16, linear_num_key_heads: 2, linear_num_value_heads: 4, linear_key_head_dim: 24, linear_value_head_dim: 16}"
	for _, set := range [][]string{
		{recurs, "parallel.layout=contiguous", "memory.recompute=none"},
		{recurs, "parallel.layout=contiguous", "memory.recompute=selective", "train.micro_batch_size=2",
			"train.global_batch_size=2"},
		{"parallel.algorithm=allgather", "memory.recompute=full"}, {"parallel.algorithm=ulysses"},
		{"parallel.algorithm=allgather", "parallel.gather_heads=1"},
		{"parallel.algorithm=hierarchical", "parallel.ulysses_degree=3", "train.micro_batch_size=2",
			"train.global_batch_size=2"},
		{"model={sliding_window: 27, layer_types: [full_attention, sliding_attention, full_attention, sliding_attention]}", "model.num_hidden_layers=4", "parallel.layout=contiguous"},
		{"parallel.layout=striped"}, {"parallel.layout=contiguous", "model.sliding_window=12"},
		{"parallel.layout=window", "model.sliding_window=12"},
		{"model.architecture=qwen3", "model.tie_word_embeddings=false"},
		{"model={architecture: gemma4_text, head_dim: 8, global_head_dim: 16, num_global_key_value_heads: 1, " +
			"attention_k_eq_v: true, sliding_window: 27, layer_types: [sliding_attention, full_attention]}", "model.num_hidden_layers=2"},
		{"model.architecture=smollm3", "model.attention_bias=true", "model.mlp_bias=true"},
		{"model.architecture=phi3", "model.head_dim=12", "model.partial_rotary_factor=0.5"},
		{"memory.offload=both", "memory.shard=gradients", "memory.recompute=full", "model.num_hidden_layers=6"},
		{"memory.offload=activations", "model.num_hidden_layers=6"},
		{"memory.offload=optimizer", "memory.shard=parameters", "precision.compute=bf16"},
		append(slices.Clone(sixteens), "memory.shard=none", "precision.compute=bf16"),
		append(slices.Clone(sixteens), "memory.shard=optimizer"), append(slices.Clone(sixteens), "lora={r: 4}"),
		append(slices.Clone(sixteens), "memory.shard=parameters", "memory.offload=optimizer"),
		append(slices.Clone(sixteens), "memory.shard=parameters", "precision.compute=bf16", "lora={r: 4}"),
		{"precision.grad_wire=bf16", "memory.shard=optimizer"}, {"precision.grad_wire=bf16", "memory.shard=gradients"},
		{"precision.grad_wire=bf16", "memory.shard=parameters", "precision.compute=bf16"},
	} {
		checkPlan(t, ranks, true, append(set, "data.seq_len=91", "train.steps=20"))
	}
}

// small makes the example's model quick to train. Its tensors still have different sizes, none a multiple of another.
var small = []string{"model.hidden_size=56", "model.intermediate_size=136", "model.num_hidden_layers=3",
	"data.validation.samples=1"}

// sixteens makes products those of E4M3, with widths for them.
var sixteens = []string{"model.hidden_size=48", "model.intermediate_size=80", "model.head_dim=16",
	"precision.linears=fp8"}

// checkPlan compares a plan with the trainers of a config, and if the CPU can run it, with a step.
func checkPlan(t *testing.T, ranks int, run bool, set []string) {
	t.Helper()
	on := "cpu"
	if !run {
		on = "cuda"
	}
	set = append(slices.Clone(small), set...)
	cfg, m := example(t, ranks, on, set...)
	peaks := make([][2]int64, ranks)
	onRanks(t, ranks, cfg, m.Room(), func(*device.Device) {}, func(tr *Trainer, c *counted) error {
		s, sumsBytes, pieces := tr.share, sumsBytes, int64(0)
		if s.OnHost {
			sumsBytes += 8 // the norm of the gradient
			for _, p := range s.Pieces {
				pieces += 4 * int64(p[0].Size()+p[1].Size()+p[2].Size())
			}
		}
		held := func(views ...View) (n int64) {
			for _, v := range views {
				n += int64(v.Size()) * int64(v.DType().Size())
			}
			return n
		}
		for _, i := range []struct {
			name      string
			got, want int64
		}{
			{"all", c.bytes.Load() - sumsBytes, m.Planned()},
			{"masters and moments", held(s.Masters, s.M, s.V), m.Weights + m.Optimizer + m.HostOptimizer - pieces},
			{"batches", held(tr.train.inputs.mem.Blocks[:]...) + held(tr.train.inputs.mem.Cos, tr.train.inputs.mem.Sin),
				m.Batches},
		} {
			if i.got != i.want {
				t.Errorf("%v: %s: %d bytes were asked for, planned are %d", set, i.name, i.got, i.want)
			}
		}
		if !run {
			return nil
		}
		if err := tr.oneStep(context.Background()); err != nil {
			return err
		}
		if _, err := tr.Validate(context.Background()); err != nil {
			return err
		}
		if got := c.bytes.Load() - sumsBytes; got != m.Planned() {
			t.Errorf("%v: after a step %d bytes are asked for, planned are %d", set, got, m.Planned())
		}
		peaks[tr.mesh.world.Rank()] = [2]int64{tr.arena.Peak(), tr.att.ring.Arena.Peak()}
		return nil
	})
	var most [2]int64
	for _, p := range peaks {
		most = [2]int64{max(most[0], p[0]), max(most[1], p[1])}
	}
	if want := [2]int64{m.Activations, m.RingBuffers}; run && most != want {
		t.Errorf("%v: activations and the ring's buffers took %v bytes, planned %v", set, most, want)
	}
}

// The plan counts the cache and the logits of log.samples, for the longest prompt. Its passes fit the activations.
func TestThePlanCountsAnswers(t *testing.T) {
	t.Parallel()
	for _, set := range []string{"precision.compute=bf16", "memory.shard=parameters"} {
		set := append(slices.Clone(small), set, "data.seq_len=91", "train.steps=20")
		_, without := example(t, 2, "cpu", set...)
		set = append(set, "log.samples={every: 5, prompts: ["+strings.Repeat("x", config.MaxPrompt)+"]}")
		cfg, m := example(t, 2, "cpu", set...)
		planned := m.Batches - without.Batches
		onRanks(t, 2, cfg, m.Room(), func(*device.Device) {}, func(tr *Trainer, c *counted) error {
			began := c.bytes.Load()
			a, err := tr.openAnswerer()
			if err != nil {
				return err
			}
			if got := c.bytes.Load() - began; got < planned || got > planned+planned/20 {
				t.Errorf("%v: %d bytes were asked for, planned are %d", set, got, planned)
			}
			_, err = a.model.Read(context.Background(), a.prompts[0].ids)
			if peak := tr.arena.Peak(); peak > m.Activations {
				t.Errorf("%v: the activations took %d bytes, planned %d", set, peak, m.Activations)
			}
			return err
		})
	}
}

// Samples of several documents take more buffers than one of the same length, since their rows travel in another way.
// The plan covers them, and not much more unless there is a window: then a rank needs few rows or all.
func TestThePlanCoversPackedDocuments(t *testing.T) {
	t.Parallel()
	const ranks, seq, steps = 3, 192, 12
	rng, text := rand.New(rand.NewPCG(1, 1)), []byte{}
	for range 60 {
		text = fmt.Appendf(text, "{\"text\": %q}\n", strings.Repeat("a", 20+rng.IntN(seq-20)))
	}
	path := filepath.Join(t.TempDir(), "documents.jsonl")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, set := range [][]string{{"parallel.algorithm=allgather"}, {"parallel.algorithm=ring"},
		{"parallel.algorithm=ulysses"},
		{"parallel.algorithm=allgather", "parallel.layout=document-zigzag", "model.sliding_window=24"},
		{"parallel.algorithm=ring", "model.sliding_window=24"}} {
		cfg, m := example(t, ranks, "cpu", append([]string{"data.path=" + path, fmt.Sprint("data.seq_len=", seq),
			"data.pack_documents=true", "data.validation={path: null, every: 0}", "parallel.layout=document",
			"parallel.gather=auto", "precision.compute=bf16"}, append(set, small...)...)...)
		peaks := make([]int64, ranks)
		onRanks(t, ranks, cfg, m.Room(), func(*device.Device) {}, func(tr *Trainer, _ *counted) error {
			for range steps {
				if err := tr.oneStep(t.Context()); err != nil {
					return err
				}
			}
			peaks[tr.mesh.world.Rank()] = tr.att.ring.Arena.Peak()
			return nil
		})
		if got := slices.Max(peaks); got > m.RingBuffers || i < 3 && float64(got) < 0.85*float64(m.RingBuffers) {
			t.Errorf("%s: the ring's buffers took %d bytes, planned are %d", set, got, m.RingBuffers)
		}
	}
}
