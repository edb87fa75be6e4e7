package train_test

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// As in transformers, the lookup gives the row of pad_token_id no gradient; the head of a tied model does.
// scripts/oracle/padding.py writes the fixtures.
func TestTheRowOfPaddingFollowsTransformers(t *testing.T) {
	for _, name := range []string{"llama", "gemma2-tied"} {
		dir := "../padding/" + name
		e := readExpect(t, dir)
		for ranks, set := range map[int]string{1: "train.micro_batch_size=1", 2: "memory={shard: parameters}"} {
			steps := mustRun(t, load(t, parityYAML(dir, e), ranks, set), ranks, train.Options{}).steps
			follows(t, fmt.Sprintf("%s, %d ranks", name, ranks), steps, e, "families")
		}
	}
}
