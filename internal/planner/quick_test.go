package planner_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A new packing by the table of an H200: the choice of an algorithm for its two kinds of layers, among those that a run has.
func BenchmarkQuickByTable(b *testing.B) {
	for _, ranks := range []int{2, 8, 64} {
		b.Run(fmt.Sprintf("%d ranks", ranks), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(3, 4))
			c := planner.Case{
				Attention: planner.Attention{DType: tensor.BF16, Batch: 1, Heads: 32, KVHeads: 8, Dim: 128, DimV: 128},
				Tokens:    8192 * ranks, Ranks: ranks, At: planner.Place{PerHost: min(ranks, 8)},
				Kinds: []planner.Kind{{Window: -1, Layers: 4}, {Window: 1024, Layers: 24}},
			}
			for left := c.Tokens; left > 0; {
				n := min(left, 1+int(rng.ExpFloat64()*float64(c.Tokens)/100))
				c.Docs, left = append(c.Docs, n), left-n
			}
			layout, err := partition.New("document", c.Docs, partition.Windows([]int{-1, 1024})...)
			if err != nil {
				b.Fatal(err)
			}
			c.Laid = partition.Ready(layout, c.Tokens, c.Ranks) // by the data, in any case
			ways, costs := planner.Shortlist(planner.Way{Layout: "document", Algorithm: "allgather", Backend: "fused"}), cluster(b, ranks)
			for b.Loop() {
				if _, err := planner.Quick(c, ways, costs); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
