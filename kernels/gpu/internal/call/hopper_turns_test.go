//go:build cuda

package call

import (
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// TestTurnsOnHost runs many blocks of keys in order, in parts, and with several heads at once. The host detects a block
// that waits for one that starts later.
func TestTurnsOnHost(t *testing.T) {
	h := newHost(t)
	const heads, blocks = 3, 5
	for _, c := range []struct{ dim, seq, lo, sms, fold, beside, group int }{
		{64, 520, -partition.Unbounded, 2, 2, 1, 1}, {64, 520, -partition.Unbounded, 6, 3, 2, 2}, {64, 520, -200, 2, 0, 0, 1},
		{256, 264, -partition.Unbounded, 2, 2, 1, 1},
		{128, 520, -200, 2, 0, 0, 2}, // one head after another
		{64, 264, -200, 2, 0, 0, 22}, // more heads than lanes, and groups across 32
		{64, 520, 0, 4, 0, 1, 2},     // packed documents
	} {
		if c.fold > 0 {
			if fold, beside := fold(blocks, heads, c.sms); fold != c.fold || beside != c.beside {
				t.Errorf("%d SMs: fold %d, beside %d", c.sms, fold, beside)
			}
		}
		bounds, band := []int{0, c.seq}, partition.Band{Lo: c.lo}
		if c.lo == 0 {
			bounds, band.Lo = []int{0, 70, 100, 300, c.seq}, -partition.Unbounded
		}
		var list tiles
		for i, end := range bounds[1:] {
			list = append(list, doc(bounds[i], end, band))
		}
		attentiontest.Check(t, h.hopper(true, hostHopper{sms: c.sms}), attentiontest.Case{
			Batch: 1, Heads: heads * c.group, KVHeads: heads, Dim: c.dim, DimV: c.dim, SeqQ: c.seq, SeqK: c.seq,
			Softmax: attention.Softmax{Scale: 0.125}, Tiles: list,
		}, tensor.BF16)
	}
}
