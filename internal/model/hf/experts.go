package hf

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cprun/cprun/kernels"
)

// Mixture describes the experts of a family.
type Mixture struct {
	// Count is the key of their number in exports. All of expertCounts are read.
	Count  string
	Router kernels.Router // what the keys do not say
	// Each names gate, up and down of an expert, with its number. Files have these, or fused tensors under the names in
	// Family.Tensors. nil: fused.
	Each []string
	// Linear: PEFT still takes names of Each and gate for experts and router, which were linear layers in transformers 4.
	Linear bool
	// InputFirst: the matrices in fused tensors are [in, out], and gate and up alternate.
	InputFirst bool
	// Apart is that of MLP. Models of the family may have no experts.
	Apart bool
}

var expertCounts = []string{"num_experts", "num_local_experts", "n_routed_experts"}

// maxExperts bounds the experts of a layer, which plans and files list.
const maxExperts = 1 << 10

// unusedKeys do not change training by themselves.
var unusedKeys = []string{coefKey, logitsKey}

// mixes reports whether a layer has experts.
func (c *Config) mixes(layer int) bool {
	f := families[c.Architecture]
	return f != nil && f.Experts != nil && c.NumExperts > 0 && layer >= c.FirstKDenseReplace &&
		!slices.Contains(c.MLPOnlyLayers, layer) && (layer+1)%max(c.DecoderSparseStep, 1) == 0
}

// mixture describes the MLP of a layer with experts.
func (c *Config) mixture() MLP {
	f, width := c.Family(), cmp.Or(c.MoEIntermediateSize, c.IntermediateSize)
	r := f.Experts.Router
	r.Normalize = r.Normalize || c.NormTopkProb
	r.Scale, r.Groups, r.Kept = c.RoutedScalingFactor, c.NGroup, c.TopkGroup
	shared := c.SharedExpertIntermediateSize
	m := MLP{Width: shared + c.NSharedExperts*width, Scaled: shared > 0, Apart: f.Experts.Apart,
		Experts: Experts{Count: c.NumExperts, Chosen: c.NumExpertsPerTok, Width: width,
			Bias: f.Tensors[ExpertDown.Bias()] != "", Router: r}}
	if m.Apart {
		m.Width = c.IntermediateSize
	}
	return m
}

// stack finds the places of experts in files.
func (c *Config) stack(t *Tensor, e Experts) {
	f, at, n := c.Family(), fmt.Sprintf(c.Family().Layer, t.Layer), c.HiddenSize
	switch in := t.Role == ExpertIn || t.Role == ExpertIn.Bias(); {
	case !in && t.Role != ExpertDown && t.Role != ExpertDown.Bias():
		return
	case f.Experts.Each != nil && !c.FusedExperts && in:
		for _, name := range f.Experts.Each[:2] {
			t.Blocks = append(t.Blocks, Block{Name: at + name, Shape: []int{e.Width, n}, Rows: e.Width})
		}
	case f.Experts.Each != nil && !c.FusedExperts:
		t.Blocks = []Block{{Name: at + f.Experts.Each[2], Shape: []int{n, e.Width}, Rows: n}}
	case f.Experts.InputFirst && in:
		b := Block{Name: t.Name, Shape: []int{e.Count, n, 2 * e.Width}, Rows: e.Width, Step: 2, Across: 2 * e.Width}
		if t.Kind != Product {
			b.Shape, b.Across = []int{e.Count, 2 * e.Width}, 0
		}
		t.Blocks = []Block{b, b}
		t.Blocks[1].Before = 1
	case f.Experts.InputFirst && t.Kind == Product:
		t.Blocks = []Block{{Name: t.Name, Shape: []int{e.Count, e.Width, n}, Rows: n, Step: 1, Across: n}}
	default:
		rows := t.Shape[0] / e.Count
		t.Blocks = []Block{{Name: t.Name, Shape: append([]int{e.Count, rows}, t.Shape[1:]...), Rows: rows}}
	}
	t.Experts = e.Count
}

// readLayout finds the form of the experts in a directory, which its config does not say.
func (c *Config) readLayout(dir string) {
	if !c.HasExperts() || c.Family().Experts.Each == nil {
		return
	}
	w, err := OpenWeights(dir)
	if err != nil {
		return // there are none yet, or others find the fault
	}
	defer w.Close()
	c.FusedExperts = true
	c.FusedExperts = slices.ContainsFunc(c.Tensors(), func(t Tensor) bool {
		return t.Role == ExpertIn && w.find(t.Name) != ""
	})
}

func (c *Config) checkExperts(f *faults) {
	family := families[c.Architecture]
	if family == nil || family.Experts == nil || family.Experts.Apart && c.NumExperts == 0 {
		return
	}
	experts, groups, kept := c.NumExperts, max(c.NGroup, 1), max(c.TopkGroup, 1)
	for i, v := range []int{experts, c.NumExpertsPerTok, c.MoEIntermediateSize,
		c.SharedExpertIntermediateSize} {
		key := []string{"num_experts", "num_experts_per_tok", widthKey, sharedKey}[i]
		if v == 0 && slices.Contains(family.Keys, key) {
			f.add(key, "missing; %s needs it", family.Name)
		}
	}
	switch {
	case experts == 0:
	case c.NumExpertsPerTok > experts:
		f.add("num_experts_per_tok", "%d of %d experts; take fewer", c.NumExpertsPerTok, experts)
	case groups == 1:
	case experts%groups > 0 || experts/groups < 2:
		f.add("n_group", "%d groups of %d experts: they have equal sizes, of at least two", groups, experts)
	case kept > groups || c.NumExpertsPerTok > kept*(experts/groups):
		f.add("topk_group", "a token cannot choose %d experts in %d of %d groups of %d", c.NumExpertsPerTok, kept, groups,
			experts/groups)
	}
}
