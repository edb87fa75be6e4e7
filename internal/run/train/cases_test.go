package train_test

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// A gpuCase is a variant of the config tiny to test on GPUs.
type gpuCase struct {
	name  string
	ranks int // minimum number of ranks
	flash bool
	set   []string
}

// backend returns the attention backend in bfloat16.
func (c *gpuCase) backend() string {
	if c.flash {
		return "flash"
	}
	return "auto"
}

var gpuCases = []gpuCase{
	{name: "qwen3", ranks: 1, set: []string{"model.architecture=qwen3"}},
	{name: "packed documents", ranks: 1, flash: true, set: []string{"data.pack_documents=true",
		"train.micro_batch_size=2", "train.global_batch_size=2"}},
	{name: "whole documents", ranks: 1, flash: true, set: []string{"data.pack_documents=true", "data.overlong=drop",
		"data.seq_len=64", "train.global_batch_size=2"}},
	{name: "sliding window", ranks: 1, set: []string{"model.sliding_window=9"}},
	{name: "micro batches with sharded gradients", ranks: 2,
		set: []string{"train.global_batch_size=4", "memory.shard=gradients"}},
	{name: "micro batches with sharded parameters", ranks: 2, set: []string{"train.global_batch_size=4",
		"memory.shard=parameters", "model.num_hidden_layers=4", "model.tie_word_embeddings=false"}},
	{name: "state and activations on the host", ranks: 2, set: []string{"train.global_batch_size=4",
		"memory.shard=parameters", "memory.offload=both", "memory.recompute=full", "model.num_hidden_layers=6"}},
	{name: "state on the host", ranks: 2,
		set: []string{"train.global_batch_size=4", "memory.shard=gradients", "memory.offload=optimizer"}},
	{name: "gradients in bf16 between ranks", ranks: 2,
		set: []string{"train.global_batch_size=4", "memory.shard=gradients", "precision.grad_wire=bf16"}},
	{name: "data x context", ranks: 4, set: []string{"parallel.data=2", "train.global_batch_size=4",
		"memory.shard=gradients"}},
	{name: "allgather", ranks: 2, set: []string{"parallel.algorithm=allgather"}},
	{name: "contiguous", ranks: 2, set: []string{"parallel.layout=contiguous"}},
	{name: "striped", ranks: 2, set: []string{"parallel.layout=striped", "memory.shard=optimizer"}},
	{name: "zigzag", ranks: 2, set: []string{"parallel.layout=zigzag", "memory.recompute=full"}},
	{name: "adapters", ranks: 1, set: []string{"lora={r: 8, dropout: 0.2}", "optimizer.lr=0.01",
		"memory.recompute=full"}},
	{name: "adapters of a sharded model", ranks: 2, set: []string{"lora={r: 4, targets: [v_proj, down_proj], " +
		"rank_pattern: {v_proj: 2}, modules_to_save: [lm_head, layers.1.self_attn.q_proj]}",
		"memory.shard=parameters", "model.num_hidden_layers=4", "model.tie_word_embeddings=false"}},
	{name: "adapters with state on the host", ranks: 2, set: []string{"lora={r: 4, modules_to_save: [embed_tokens, norm]}",
		"memory.shard=parameters", "memory.offload=both", "memory.recompute=full", "model.num_hidden_layers=6"}},
	{name: "frozen layers", ranks: 2, set: []string{"train.freeze=[\"model.embed_tokens.*\", \"model.layers.0.*\", " +
		"\"*norm.weight\"]", "memory.shard=gradients", "train.global_batch_size=4"}},
	{name: "tied and clipped", ranks: 1, set: []string{"model.tie_word_embeddings=true", "optimizer.grad_clip=0.1"}},
}

// The rules accept every case on a machine with GPUs, so that a failure there is about the case.
func TestGPUCasesAreValid(t *testing.T) {
	m := machine.Machine{Arch: 90, CUDNN: backends.V(9, 19, 0), Flash: machine.BuiltFlash, GPUs: 4, Memory: 140 << 30}
	for _, c := range gpuCases {
		for _, v := range [][]string{
			{"precision.compute=fp32", "attention.backend=reference"},
			{"precision.compute=fp32", "attention.backend=flash"},
			{"precision.compute=bf16", "attention.backend=" + c.backend()},
		} {
			set := slices.Concat([]string{"model.head_dim=64"}, c.set, v)
			cfg, err := config.Load(writeFile(t, "train.yaml", tiny), config.Options{Set: set, Ranks: 4, Device: "cuda"})
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
				continue
			}
			choice, err := backend.Choose(cfg, m, 0)
			if err != nil {
				t.Errorf("%s, %v: %v", c.name, v, err)
				continue
			}
			cfg.Parallel.Backend = choice.Backend.String()
			if _, err := plan.Fit(cfg, 4, m, nil); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
	}
}
