package train_test

import (
	"testing"

	"github.com/cprun/cprun/internal/foresee/plan"
)

// A step sends the bytes predicted by the plan, if all ranks send the same.
func TestAttentionSendsThePlannedBytes(t *testing.T) {
	for _, c := range []struct {
		ranks int
		set   []string
	}{
		{2, []string{"parallel.algorithm=ring"}},
		{4, []string{"parallel.algorithm=allgather", "parallel.gather_heads=1", "memory.recompute=full"}},
		{4, []string{"parallel.algorithm=ulysses", "train.micro_batch_size=2", "train.global_batch_size=4"}},
		{2, []string{"parallel.algorithm=ulysses", "precision.compute=bf16"}},
	} {
		set := append(c.set, "data.seq_len=64", "parallel.layout=zigzag", "train.steps=2")
		cfg := load(t, tiny, c.ranks, set...)
		p, err := plan.Make(cfg, c.ranks, plan.Options{})
		if err != nil {
			t.Fatal(err)
		}
		want := p.Communication.AttentionForward + p.Communication.AttentionBackward
		for _, s := range curve(t, tiny, c.ranks, set...) {
			if int64(s.AttentionBytes) != want || want == 0 {
				t.Errorf("%v: step %d sends %v bytes, planned are %d", set, s.Step, s.AttentionBytes, want)
			}
		}
	}
}
