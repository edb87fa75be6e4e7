package backend

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/tensor"
)

// The cases of users that a train.yaml cannot express; the others are in cmd/cprun, through
// cprun plan, and the strides of case 3 are in package attention, TestLayoutMultiQuerySplit.

// Case 1 as it was reported: q, k, v [48, 16534, 18, 128], bf16, no mask, which a trainer of
// causal models never asks for.
func TestCaseLengthsWithoutAMask(t *testing.T) {
	p := backends.Params{
		Arch: 80, CUDNN: backends.V(8, 9, 7), Want: backends.Fused, DType: tensor.BF16,
		Batch: 48, SeqQ: 16534, SeqKV: 16534, Heads: 18, KVHeads: 18, HeadDim: 128, HeadDimV: 128,
		WindowLeft: -1, WindowRight: -1, Training: true, ContextSize: 2, Algorithm: "ring", Layout: "zigzag",
	}
	if ids := spoken(t, p, backends.Fused); !slices.Contains(ids, "fused-seq-multiple-64") {
		t.Errorf("cuDNN 8.9.7: %q", ids)
	}
	if c, err := backends.Select(p); err == nil {
		t.Errorf("cuDNN 8.9.7 runs it with %+v", c.Remedies)
	}
	p.CUDNN = backends.V(9, 0, 0)
	if c, err := backends.Select(p); err != nil || len(c.Remedies) != 0 {
		t.Errorf("cuDNN 9.0.0: %+v, %v", c, err)
	}
}

// spoken returns the ids of the rules that reject flash or fused. The choice of the reference lists them.
func spoken(t *testing.T, p backends.Params, b backends.Backend) (ids []string) {
	t.Helper()
	p.Want = backends.Reference
	c, err := backends.Select(p)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range c.Rejected {
		if r.Backend == b {
			ids = append(ids, r.Rule)
		}
	}
	return ids
}

// Case 4: planning a run again asks the rules nothing new, and layers of two windows do not
// push each other out.
func TestCaseOneSelectionAShape(t *testing.T) {
	m := gpu(90, backends.V(9, 18, 1))
	cfg := load(t, "cases/windows.yaml", 8, m, "data.seq_len=65528") // a shape of this test alone
	first, err := Choose(cfg, m, 0)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Choose(cfg, m, 0)
	if err != nil || len(again.Layers) != 2 {
		t.Fatal(again, err)
	}
	for i := range again.Layers {
		if again.Layers[i] != first.Layers[i] {
			t.Errorf("layers of kind %d were selected again", i)
		}
	}
}
