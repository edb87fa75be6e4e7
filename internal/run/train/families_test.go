package train_test

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

var families = []string{"gemma2", "gemma3", "llama-bias", "mistral", "phi3", "qwen2", "smollm3"}

// A small model of each family follows ten steps of transformers, on one rank and on several with three layouts.
func TestFamiliesFollowTransformers(t *testing.T) {
	for _, name := range families {
		dir := "../families/" + name
		e := readExpect(t, dir)
		for _, v := range []struct {
			ranks int
			set   string
		}{
			{1, "parallel={layout: zigzag, algorithm: ring}"},
			{4, "parallel={layout: zigzag, algorithm: ring}"},
			{4, "parallel={layout: striped, algorithm: allgather}"},
			{2, "parallel={layout: contiguous, algorithm: ulysses}"},
			{2, "memory={recompute: full, shard: parameters}"},
		} {
			cfg := load(t, parityYAML(dir, e), v.ranks, v.set)
			what := fmt.Sprintf("%s, %d ranks, %s", name, v.ranks, v.set)
			follows(t, what, mustRun(t, cfg, v.ranks, train.Options{}).steps, e, "fp32")
		}
	}
}
