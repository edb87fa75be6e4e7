package train_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// Products in E4M3 follow the curve of others, on any number of ranks, with all memory options and adapters, and ranks
// are closer to each other than to it.
func TestLinearsInE4M3(t *testing.T) {
	t.Parallel()
	base := []string{"model.intermediate_size=32", "model.head_dim=16", "train.global_batch_size=4"}
	adapters, experts := "lora={r: 4, dropout: 0.1}", []string{"model.architecture=qwen3_moe", "model.num_experts=4",
		"model.num_experts_per_tok=2", "model.moe_intermediate_size=16"}
	for _, v := range []struct {
		ranks int
		more  []string
	}{
		{1, []string{"precision.compute=bf16"}},
		{1, []string{adapters}},
		{2, []string{"memory.recompute=full", "memory.shard=gradients"}},
		{2, []string{"data.pack_documents=true", adapters}},
		{4, []string{"memory.shard=parameters", "memory.recompute=selective"}},
		{1, append([]string{"lora={r: 4, targets: all-linear}"}, experts...)},
		{2, append([]string{"memory.shard=parameters", "memory.recompute=full"}, experts...)},
	} {
		set := slices.Concat(base, v.more)
		want, scaled := curve(t, tiny, v.ranks, set...), append(set, "precision.linears=fp8")
		got := curve(t, tiny, v.ranks, scaled...)
		closeTo(t, fmt.Sprint(v), got, want, 1e-2)
		if got[0].Loss == want[0].Loss {
			t.Errorf("%v: the first loss is %v, as without fp8", v, got[0].Loss)
		}
		if v.ranks > 1 {
			one := curve(t, tiny, 1, slices.DeleteFunc(slices.Clone(scaled), func(s string) bool {
				return s == "memory.shard=gradients" || s == "memory.shard=parameters"
			})...)
			closeTo(t, fmt.Sprint(v, " beside one rank"), got, one, 5e-3)
		}
	}
}

// Matrices in E4M3 have the same bits with any sharding, optimizer on the host, and copies of weights: ranks with parts
// of a row find its factor together. Adapters too: frozen matrices rest in E4M3.
func TestShardedCodes(t *testing.T) {
	t.Parallel()
	// Rows of 48 and 80 elements, of which the parts of ranks, multiples of 64 elements, cut some.
	base := []string{"model.hidden_size=48", "model.intermediate_size=80", "model.head_dim=16",
		"model.num_hidden_layers=3", "train.steps=3",
		"precision.linears=fp8", "optimizer.grad_clip=0"}
	for m, mode := range [][]string{
		{"precision.compute=bf16"}, {"precision.compute=fp32"}, {"lora={r: 4}"}, {"lora={r: 4}", "precision.compute=bf16"},
		{"train.freeze=[\"*.0.*q_proj*\", \"*.1.*\"]"}, {"lora={r: 4, base: bf16}", "precision.compute=bf16"},
	} {
		mode = append(slices.Clone(base), mode...)
		for ranks := 2; ranks <= 4; ranks++ {
			want := curve(t, tiny, ranks, append(slices.Clone(mode), "memory.shard=none")...)
			for i, more := range [][]string{
				{"memory.shard=optimizer"}, {"memory.shard=gradients"}, {"memory.shard=parameters"},
				{"memory.shard=none", "memory.offload=optimizer"}, {"memory.shard=parameters", "memory.offload=both"},
			} {
				if testing.Short() && (i+m+ranks)%3 > 0 {
					continue
				}
				for i, s := range curve(t, tiny, ranks, append(slices.Clone(mode), more...)...) {
					if s.Loss != want[i].Loss { // norms are sums in another order
						t.Errorf("%v, %d ranks, %v: loss %v of step %d, want %v", mode, ranks, more, s.Loss, i+1, want[i].Loss)
					}
				}
			}
		}
	}
}

// A run in E4M3 resumes with the same bits, since codes follow from the weights. It also continues one without E4M3.
func TestCodesResume(t *testing.T) {
	t.Parallel()
	for _, more := range [][]string{{"memory.shard=none"}, {"memory.shard=parameters", "memory.offload=optimizer"},
		{"memory.shard=parameters", "lora={r: 4, base: fp8}"}} {
		set := append([]string{"model.hidden_size=48", "model.intermediate_size=80", "model.head_dim=16",
			"precision={linears: fp8, compute: bf16}"}, more...)
		first := mustRun(t, load(t, tiny, 2, append(set, "train.steps=2")...), 2, train.Options{})
		second := mustRun(t, load(t, tiny, 2, set...), 2, train.Options{From: first.dir + "/checkpoints/step-00000002",
			NoSave: true})
		if got, want := losses(append(first.steps, second.steps...)), losses(curve(t, tiny, 2, set...)); got != want {
			t.Errorf("%v:\n%s\nwant\n%s", more, got, want)
		}
		plain := mustRun(t, load(t, tiny, 1, append(set, "train.steps=2", "precision.linears=bf16", "lora=null")...), 1,
			train.Options{})
		other := mustRun(t, load(t, tiny, 2, append(set, "lora=null")...), 2,
			train.Options{From: plain.dir + "/checkpoints/step-00000002", NoSave: true})
		closeTo(t, "after steps without E4M3", other.steps, curve(t, tiny, 2, append(set, "lora=null")...)[2:], 2e-2)
	}
}
