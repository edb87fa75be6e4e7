package backends

import (
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/qkv"
	"github.com/cprun/cprun/tensor"
)

// The four cases that users brought, with their shapes and versions.

// Case 1: q, k, v [48, 16534, 18, 128] in bfloat16 under context parallelism, cuDNN 8.9.7:
// 16534 is no multiple of 64, nor is what a rank holds of it. The peer fell to no backend.
func TestCaseSequenceNotMultipleOf64(t *testing.T) {
	for _, arch := range []string{"80", "90"} {
		for _, cp := range []string{"1", "2", "4", "8"} {
			base := "batch=48 s=16534 h=18 d=128 mask=full arch=" + arch + " cp=" + cp
			old := chosen(t, with(base+" cudnn=8.9.7"))
			if old.Backend != Flash {
				t.Errorf("%s, cuDNN 8.9.7: %s", base, old.Backend)
			}
			r := find(t, old.Rejected, "fused-seq-multiple-64")
			if !strings.Contains(r.Fix, "9.0.0") || r.Hop == "" || r.Remedy.Kind != PadSequence {
				t.Errorf("%s: %+v", base, r)
			}
			// Asked for by name, cuDNN runs it on padded lengths.
			forced := chosen(t, with(base+" cudnn=8.9.7 want=fused"))
			for _, a := range forced.Remedies {
				for _, call := range a.Calls {
					if a.Kind != PadSequence || call.SeqQ%64 != 0 || call.SeqKV%64 != 0 || !call.PaddedKeys {
						t.Errorf("%s: remedy %s gives %s", base, a.Kind, &call)
					}
				}
			}
			if len(forced.Remedies) == 0 {
				t.Errorf("%s: cuDNN 8.9.7 without a remedy", base)
			}
			if c := chosen(t, with(base+" cudnn=9.0.0 want=fused")); len(c.Remedies) != 0 {
				t.Errorf("%s, cuDNN 9.0.0: %v", base, c.Remedies)
			}
		}
	}
}

// Case 2: H100, cuDNN 9.1.0, head dims 192 and 128: the forward pass ran and the backward pass
// died without a plan. Inference is not affected; cuDNN 9.5.0 or padding V cures it.
func TestCaseHeadDimsInTraining(t *testing.T) {
	c := chosen(t, with("arch=90 cudnn=9.1.0 d=192 dv=128"))
	if c.Backend != Flash || len(c.Remedies) != 1 || c.Remedies[0].Kind != PadHeadDims || c.Remedies[0].Calls[0].HeadDimV != 192 {
		t.Errorf("training: %s with %+v", c.Backend, c.Remedies)
	}
	if r := find(t, c.Rejected, "fused-head-dim-sm90-training-9.5.0"); !strings.Contains(r.Fix, "9.5.0") || !strings.Contains(r.Reason, "128") {
		t.Errorf("%+v", r)
	}
	refused(t, with("arch=90 cudnn=9.1.0 d=192 dv=128 want=fused"))
	for _, runs := range []string{"cudnn=9.1.0 train=0", "cudnn=9.5.0", "cudnn=9.19.0"} {
		if c := chosen(t, with("arch=90 d=192 dv=128 "+runs)); c.Backend != Fused || len(c.Remedies) != 0 {
			t.Errorf("%s: %s with %v", runs, c.Backend, c.Remedies)
		}
	}
}

// Case 3: seq 2048, 16 query heads, 1 KV head, 64 channels, float16, all in one tensor
// [seq, batch, 16 + 2*1, 64]. It was taken for three contiguous tensors, and the result was
// wrong by 6.1953. The layout is known here; strides that fit none are copied first.
func TestCaseHeadsInOneTensor(t *testing.T) {
	const seq, batch, heads, dim = 2048, 2, 16, 64
	row := int64((heads + 2) * dim)
	mem := tensor.New(tensor.F16, 1, 1, 1, seq*batch*int(row)).Memory()
	view := func(head int64, n int) attention.View {
		return tensor.NewView(mem, tensor.F16, head*dim, [4]int{batch, seq, n, dim}, [4]int64{row, batch * row, dim, 1})
	}
	q, k, v := view(0, heads), view(heads, 1), view(heads+1, 1)
	layout, fit := qkv.Detect(q, k, v)
	if layout != (qkv.Layout{Q: qkv.SBHD, KV: qkv.SBHD, Packing: qkv.QKVHeads}) || fit != qkv.Exact {
		t.Fatalf("detected as %v, %v; want sb(h+2h_g)d", layout, fit)
	}
	p := with("want=fused cudnn=9.2.1 dtype=fp16 batch=2 s=2048 h=16 g=1 d=64")
	p.Format, p.Packing = layout.Q, layout.Packing
	if c := chosen(t, p); c.Backend != Fused || len(c.Remedies) != 0 {
		t.Errorf("sb(h+2h_g)d: %s with %v", c.Backend, c.Remedies)
	}
	if _, fit = qkv.Detect(v, k, q); fit == qkv.Exact { // as if the split had been in another order
		t.Fatal("views in the wrong order are of a known layout")
	}
	p.Packing, p.Contiguous = qkv.Separate, false
	c := chosen(t, p)
	if len(c.Remedies) != 1 || c.Remedies[0].Kind != MakeContiguous || !c.Remedies[0].Calls[0].Contiguous {
		t.Errorf("unknown strides: %s with %+v", c.Backend, c.Remedies)
	}
}

// fp8Meta is what an FP8 step carries: of it, the recipe alone decides.
type fp8Meta struct {
	recipe Recipe
	scale  float32
	amax   []float32
}

// Case 4: the selection ran at every step, because the scales of FP8 were compared.
func TestCaseSelectionRunsOnceForEachShape(t *testing.T) {
	var s Selector
	shapes := []Params{with("fp8=delayed"), with("fp8=delayed s=8192"), with("fp8=delayed train=0 g=4")}
	meta := fp8Meta{recipe: DelayedScaling, scale: 1}
	for step := range 1000 {
		meta.scale *= 1.01
		meta.amax = append(meta.amax, float32(step))
		for _, p := range shapes { // layers of several shapes in turn
			p.FP8 = meta.recipe
			if c, err := s.Select(p); err != nil || c.Backend != Fused {
				t.Fatalf("step %d: %v, %v", step, c, err)
			}
		}
	}
	if n := s.Selections(); n != int64(len(shapes)) {
		t.Errorf("%d selections for %d shapes", n, len(shapes))
	}
	for i := range shapes {
		shapes[i].FP8 = CurrentScaling
		s.Select(shapes[i])
	}
	if n := s.Selections(); n != int64(2*len(shapes)) {
		t.Errorf("%d selections after another recipe, want %d", n, 2*len(shapes))
	}
}

// TestCasesNameTheirRules keeps the ids that users and scripts look for.
func TestCasesNameTheirRules(t *testing.T) {
	for _, id := range []string{"fused-seq-multiple-64", "fused-head-dim-sm90-training-9.5.0", "fused-strided"} {
		if !slices.ContainsFunc(Rules(), func(r Rule) bool { return r.ID == id }) {
			t.Errorf("no rule %s", id)
		}
	}
}
