package train_test

import (
	"testing"

	"github.com/cprun/cprun/internal/metrics"
	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/train"
)

// Layers of a window that run by an algorithm of their own compute what they do under the config's, and send what that algorithm
// sends.
func TestKindsOfLayersRunApart(t *testing.T) {
	const ranks, window = 2, 9
	run := func(algorithm string, kinds map[int]planner.Way) []metrics.Step {
		cfg := load(t, tiny(t), ranks, "parallel.algorithm="+algorithm, "model.layer_types=[full_attention, sliding_attention]", "model.sliding_window=10")
		return mustRun(t, cfg, ranks, train.Options{Kinds: kinds}).steps
	}
	ring, ulysses := run("ring", nil), run("ulysses", nil)
	mixed := run("ring", map[int]planner.Way{window: {Algorithm: "ulysses"}})
	other := run("ulysses", map[int]planner.Way{window: {Algorithm: "ring"}})
	closeTo(t, "a window by ulysses", mixed, ring, 1e-5)
	closeTo(t, "a window by a ring", other, ring, 1e-5)
	for i := range ring {
		least, most := ring[i].AttentionBytes, ulysses[i].AttentionBytes // of the rank that sends most
		if a, b := mixed[i].AttentionBytes, other[i].AttentionBytes; min(a, b) <= least || max(a, b) >= most || a == b {
			t.Errorf("step %d: %v and %v bytes; all by a ring %v, all by ulysses %v", i, a, b, ring[i].AttentionBytes, ulysses[i].AttentionBytes)
		}
	}
	same := run("ring", map[int]planner.Way{window: {Algorithm: "ring"}, -1: {Algorithm: "ring"}})
	closeTo(t, "kinds that do as the config says", same, ring, 0)
}
