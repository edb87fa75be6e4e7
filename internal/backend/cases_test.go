package backend

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/internal/machine"
	"github.com/cprun/cprun/tensor"
)

// The cases of users that a train.yaml cannot express; the others are in cmd/cprun, through
// cprun plan, and the strides of case 3 are in package attention, TestLayoutMultiQuerySplit.

// Case 1 as it was reported: q, k, v [48, 16534, 18, 128], bf16, no mask, which a trainer of
// causal models never asks for.
func TestCaseLengthsWithoutAMask(t *testing.T) {
	p := backends.Params{
		Arch: 80, CUDNN: backends.V(8, 9, 7), Want: backends.Fused, DType: tensor.BF16, Contiguous: true,
		Batch: 48, SeqQ: 16534, SeqKV: 16534, Heads: 18, KVHeads: 18, HeadDim: 128, HeadDimV: 128,
		WindowLeft: -1, WindowRight: -1, Training: true, ContextSize: 2, Algorithm: "ring", Layout: "zigzag",
	}
	if ids := spoken(t, p, backends.Fused); !slices.Contains(ids, "fused-seq-multiple-64") {
		t.Errorf("cuDNN 8.9.7: %q", ids)
	}
	c, err := backends.Select(p)
	if err == nil {
		t.Errorf("cuDNN 8.9.7: this build, which pads nothing, runs it with %+v", c.Remedies)
	}
	p.Unbuilt = true
	c, err = backends.Select(p)
	if err != nil || len(c.Remedies) == 0 || c.Remedies[0].Kind != backends.PadSequence {
		t.Errorf("cuDNN 8.9.7: %+v, %v; want the length padded", c, err)
	}
	p.Unbuilt = false
	p.CUDNN = backends.V(9, 0, 0)
	if c, err = backends.Select(p); err != nil || len(c.Remedies) != 0 {
		t.Errorf("cuDNN 9.0.0: %+v, %v", c, err)
	}
}

// Case 2: q and k of head dim 192, v of 128, on H100: a model here has one head dim.
func TestCaseHeadDimsThatDiffer(t *testing.T) {
	p := backends.Params{
		Arch: 90, CUDNN: backends.V(9, 1, 0), Flash: machine.BuiltFlash, DType: tensor.BF16, Contiguous: true,
		Batch: 2, SeqQ: 4096, SeqKV: 4096, Heads: 128, KVHeads: 128, HeadDim: 192, HeadDimV: 128,
		Causal: true, WindowLeft: -1, Training: true, Unbuilt: true,
	}
	const rule = "fused-head-dim-sm90-training-9.5.0"
	for _, c := range []struct {
		cudnn    backends.Version
		training bool
		want     backends.Backend
		speaks   bool
	}{
		{backends.V(9, 1, 0), true, backends.Flash, true}, // with V padded
		{backends.V(9, 1, 0), false, backends.Fused, false},
		{backends.V(9, 4, 0), true, backends.Flash, true},
		{backends.V(9, 5, 0), true, backends.Fused, false},
		{backends.V(9, 11, 0), true, backends.Fused, false},
	} {
		p.CUDNN, p.Training = c.cudnn, c.training
		got, err := backends.Select(p)
		if err != nil || got.Backend != c.want {
			t.Errorf("cuDNN %s, training %t: %+v, %v; want %s", c.cudnn, c.training, got, err, c.want)
			continue
		}
		if speaks := slices.Contains(spoken(t, p, backends.Fused), rule); speaks != c.speaks {
			t.Errorf("cuDNN %s, training %t: %s speaks: %t", c.cudnn, c.training, rule, speaks)
		}
		if c.want == backends.Flash && (len(got.Remedies) != 1 || got.Remedies[0].Kind != backends.PadHeadDims) {
			t.Errorf("flash runs with %+v, want V padded", got.Remedies)
		}
		q := p
		q.Unbuilt = false
		if _, err := backends.Select(q); (err == nil) != (c.want == backends.Fused) {
			t.Errorf("cuDNN %s, training %t: this build, which pads nothing: %v", c.cudnn, c.training, err)
		}
	}
}

func spoken(t *testing.T, p backends.Params, b backends.Backend) (ids []string) {
	t.Helper()
	all, err := backends.Evaluate(p)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
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
	before := selector.Selections()
	for range 1000 {
		if _, err := Choose(cfg, m, 0); err != nil {
			t.Fatal(err)
		}
	}
	// Two windows; a third and a fourth selection where the best of the two differ.
	if n := selector.Selections() - before; n < 2 || n > 4 {
		t.Errorf("1,000 plans of one run took %d selections", n)
	}
}
