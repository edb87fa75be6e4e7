package train_test

import (
	"reflect"
	"testing"

	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/train"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// byBytes is costs of a machine on which only the bytes that travel take time.
type byBytes struct{}

func (byBytes) Call(c planner.Call) float64 { return 1e-9 * float64(partition.Pairs(c.Tiles)) }
func (byBytes) Exchange(_ bool, bytes int64, _ int) float64 {
	return float64(bytes)
}
func (byBytes) Copy(int64) float64 { return 0 }
func (byBytes) Host(int) float64   { return 0 }

// Where a packing takes another way than the config says, training does what it does under a config that says so.
func TestPackingsTakeTheWayThatIsChosen(t *testing.T) {
	const ranks = 3
	set := []string{"data.pack_documents=true", "parallel.layout=document", "data.seq_len=61"}
	run := func(algorithm string, p *train.Packings, more ...string) [][3]any {
		cfg := load(t, tiny(t), ranks, append(append(more, set...), "parallel.algorithm="+algorithm)...)
		var c [][3]any
		for _, s := range mustRun(t, cfg, ranks, train.Options{Packings: p}).steps {
			c = append(c, [3]any{s.Loss, s.GradNorm, s.AttentionBytes})
		}
		return c
	}
	cfg := load(t, tiny(t), ranks, set...)
	of := planner.Case{
		Attention: planner.Attention{DType: tensor.F32, Batch: 1, Heads: cfg.Model.NumAttentionHeads, KVHeads: cfg.Model.NumKeyValueHeads, Dim: cfg.Model.HeadDim, DimV: cfg.Model.HeadDim},
		Tokens:    61, Ranks: ranks,
	}
	for _, w := range cfg.Model.Windows() {
		of.Kinds = append(of.Kinds, planner.Kind{Window: w, Layers: 1})
	}
	ring, gather := run("ring", nil), run("allgather", nil, "parallel.gather=beside")
	if reflect.DeepEqual(ring, gather) {
		t.Fatal("a ring and an all-gather cannot be told apart")
	}
	before := run("allgather", nil, "parallel.gather=before")
	ways := planner.Shortlist(planner.Way{Layout: "document", Algorithm: "ring", Backend: "flash"})
	for _, c := range []struct {
		ways []planner.Way
		want [][3]any
	}{{ways[:1], ring}, {ways[1:], gather}, {ways, gather}, {ways[len(ways)-1:], before}} { // which sends what is read, and no more
		if got := run("ring", train.NewPackings(byBytes{}, of, c.ways)); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %v, want %v", c.ways, got, c.want)
		}
	}
}
