//go:build cuda

package call

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// TestFreeTurnsOnHost runs blocks of keys with different numbers of visible queries, of which the shortest of all heads
// come last, and some have none.
func TestFreeTurnsOnHost(t *testing.T) {
	h := newHost(t)
	for _, c := range []struct {
		sms, together, blocks int
		fresh                 bool // the kernel sets gradients of fresh keys
		part                  bool // only some keys are fresh
		short                 bool // run with -short
		tiles                 tiles
	}{
		{1, 2, 3, true, false, false, tiles{doc(0, 300, causal)}},
		{1, 1, 3, true, false, true, tiles{doc(0, 130, causal), tile(130, 300, 140, 300, full)}},
		{1, 0, 2, false, true, true, tiles{doc(0, 100, causal), tile(100, 300, 260, 300, full)}},
		{8, 3, 3, true, true, true, tiles{doc(0, 300, full)}},
		{2, 0, 3, true, false, true, tiles{doc(0, 300, causal)}},
		{2, 2, 3, true, true, true, tiles{tile(128, 300, 0, 300, causal)}},
		{2, 1, 3, true, true, true, tiles{doc(0, 70, causal), doc(70, 300, causal)}}, // all heads at each step
	} {
		if testing.Short() && !c.short {
			continue
		}
		attentiontest.Check(t, h.hopper(false, hostHopper{sms: c.sms}), attentiontest.Case{
			Batch: 2, Heads: 4, KVHeads: 2, Dim: 64, DimV: 64, SeqQ: 300, SeqK: 300, Softmax: attention.Softmax{Scale: 0.125},
			Tiles: slices.Clone(c.tiles), Started: c.part, PartFresh: c.part,
		}, tensor.BF16)

		f := flashOf(300, 300, 2, 64, c.tiles...)
		s, _ := source.HopperShapeFor(64, 64)
		l := f.HopperBackward(s, SMs{c.sms, c.sms}, span(0, 300))
		if int(l.Params.Together) != c.together || int(l.Params.Blocks) != c.blocks || l.SetsFresh != c.fresh {
			t.Errorf("%v: %d of %d blocks together, fresh %t", c.tiles, l.Params.Together, l.Params.Blocks, l.SetsFresh)
		}
	}
}
