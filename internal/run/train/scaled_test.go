package train_test

import (
	"fmt"
	"slices"
	"testing"
)

// Products in E4M3 follow the curve of others, on any number of ranks, with all memory options and adapters, and ranks
// are closer to each other than to it.
func TestLinearsInE4M3(t *testing.T) {
	t.Parallel()
	base := []string{"model.intermediate_size=32", "model.head_dim=16", "train.global_batch_size=4"}
	adapters := "lora={r: 4, dropout: 0.1}"
	for _, v := range []struct {
		ranks int
		more  []string
	}{
		{1, []string{"precision.compute=bf16"}},
		{1, []string{adapters}},
		{2, []string{"memory.recompute=full", "memory.shard=gradients"}},
		{2, []string{"data.pack_documents=true", adapters}},
		{4, []string{"memory.shard=parameters", "memory.recompute=selective"}},
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
