package ring_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// TestRandomMasks holds the ring in float64, under every algorithm, against one device that asks the definition
// of the mask for each pair: windows of two sides, both alignments, documents with lengths in keys of their own and
// of 0, slices that overlap.
func TestRandomMasks(t *testing.T) {
	for seed := range uint64(ring.Draws(60)) {
		d := attentiontest.RandomDefinition(seed, 36)
		mask := ring.Must(d.Mask())
		layouts := []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{},
			partition.Window{Rows: 9}}
		if d.Docs != nil && d.DocsKV == nil {
			layouts = append(layouts, partition.Document{Docs: d.Docs})
		}
		rng := rand.New(rand.NewPCG(seed, 24))
		rows := partition.Shape{SeqQ: d.SeqQ, SeqKV: d.SeqKV, Mask: d.Rows()}
		p := newProblem(rng, tensor.F64, 2, rows, [2]int{4, 2}, 5, 3)
		want := whole(p)
		p.shape.Mask = mask
		p.shape.Size, p.shape.Layout = 1+int(seed%6), layouts[seed/6%uint64(len(layouts))]
		for _, algorithm := range ring.Variants {
			what := fmt.Sprintf("%+v, %s, %s, %d ranks", d, algorithm, p.shape.Layout.Name(), p.shape.Size)
			compare(t, what, run(t, p, algorithm, reference), want, 1e-11)
		}
	}
}

// The CPU's kernel computes them as well.
func TestRandomMasksOnTheCPU(t *testing.T) {
	for seed := range uint64(40) {
		d := attentiontest.RandomDefinition(1000+seed, 90)
		mask := ring.Must(d.Mask())
		rng := rand.New(rand.NewPCG(seed, 25))
		rows := partition.Shape{SeqQ: d.SeqQ, SeqKV: d.SeqKV, Mask: d.Rows()}
		p := newProblem(rng, tensor.F32, 1, rows, [2]int{2, 1}, 16, 16)
		want := whole(p)
		p.shape.Mask, p.shape.Size, p.shape.Layout = mask, 1+int(seed%4), partition.Zigzag{}
		algorithm := ring.Variants[seed%uint64(len(ring.Variants))]
		compare(t, fmt.Sprintf("%+v, %s, %d ranks", d, algorithm, p.shape.Size), run(t, p, algorithm, onCPU), want,
			1e-5)
	}
}
