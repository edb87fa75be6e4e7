package backends

import (
	"slices"
	"strings"
	"testing"
)

// These cases come from users, with their shapes and versions.

// Case 1: q, k, v [48, 16534, 18, 128] in bfloat16 under context parallelism, cuDNN 8.9.7. Neither 16534 nor a rank's
// shard is a multiple of 64. The peer found no backend.
func TestCaseSequenceNotMultipleOf64(t *testing.T) {
	for _, arch := range []string{"80", "90"} {
		for _, cp := range []string{"1", "2", "4", "8"} {
			base := "batch=48 s=16534 h=18 d=128 mask=full arch=" + arch + " cp=" + cp
			old := chosen(t, with(base+" cudnn=8.9.7"))
			if old.Backend != Flash {
				t.Errorf("%s, cuDNN 8.9.7: %s", base, old.Backend)
			}
			r := find(t, old.Rejected, "fused-seq-multiple-64")
			if !strings.Contains(r.Fix, "9.0.0") || r.Hop == "" {
				t.Errorf("%s: %+v", base, r)
			}
			refused(t, with(base+" cudnn=8.9.7 want=fused"))
			if c := chosen(t, with(base+" cudnn=9.0.0 want=fused")); len(c.Remedies) != 0 {
				t.Errorf("%s, cuDNN 9.0.0: %v", base, c.Remedies)
			}
		}
	}
}

// Case 2: H100, cuDNN 9.1.0, head dims 192 and 128. The forward pass ran, and the backward pass failed without a plan.
// Inference is not affected; cuDNN 9.5.0 fixes it.
func TestCaseHeadDimsInTraining(t *testing.T) {
	c := refused(t, with("arch=90 cudnn=9.1.0 d=192 dv=128"))
	find(t, c.Rejected, "flash-head-dims-differ")
	if r := find(t, c.Rejected, "fused-head-dim-sm90-training-9.5.0"); !strings.Contains(r.Fix, "9.5.0") ||
		!strings.Contains(r.Reason, "128") {
		t.Errorf("%+v", r)
	}
	refused(t, with("arch=90 cudnn=9.1.0 d=192 dv=128 want=fused"))
	for _, runs := range []string{"cudnn=9.1.0 train=0", "cudnn=9.5.0", "cudnn=9.19.0"} {
		if c := chosen(t, with("arch=90 d=192 dv=128 "+runs)); c.Backend != Fused || len(c.Remedies) != 0 {
			t.Errorf("%s: %s with %v", runs, c.Backend, c.Remedies)
		}
	}
}

// TestCasesNameTheirRules pins rule ids that users and scripts search for.
func TestCasesNameTheirRules(t *testing.T) {
	for _, id := range []string{"fused-seq-multiple-64", "fused-head-dim-sm90-training-9.5.0"} {
		if !slices.ContainsFunc(Rules(), func(r Rule) bool { return r.ID == id }) {
			t.Errorf("no rule %s", id)
		}
	}
}
