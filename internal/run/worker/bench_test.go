package worker

import (
	"testing"

	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/ring"
)

// cuDNN takes packs of documents as training does: in one call, with memory for it.
func TestBenchOfDocumentsIsPacked(t *testing.T) {
	m, err := machine.Assume([]string{"arch=sm90,cudnn=9.19.0"})
	if err != nil {
		t.Fatal(err)
	}
	s := bench.AttentionSpec{
		Heads: 8, KVHeads: 2, HeadDim: 128, DType: "bf16", Backend: "fused", Causal: true, Window: -1,
		Rows: []bench.AttentionCase{{Seq: 4096, Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring"}}},
	}
	plain, err := benchDevice(&bench.Task{Machine: m, Attention: &s}, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	packs := s
	packs.Documents, packs.Packs = "magi", [][]int{{1024, 3072}}
	packed, err := benchDevice(&bench.Task{Machine: m, Attention: &packs}, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	if plain.Packed || !packed.Packed || packed.Workspace == plain.Workspace {
		t.Errorf("packed %t and %t, workspace %d and %d bytes", plain.Packed, packed.Packed, plain.Workspace,
			packed.Workspace)
	}
}
