//go:build cuda

package gpu

import (
	"context"
	"math"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// TestFusedHold checks that a fold of held gradients equals a fold into complete gradients, also if the pass ends in
// between.
func TestFusedHold(t *testing.T) {
	const seq, heads, kvHeads, dim, lo, hi = 512, 4, 2, 64, 64, 320
	all, last := span(0, seq), span(200, seq)
	cases := map[string][]partition.Tile{
		"causal":       {wholeTile(seq, causal)},
		"half keys":    farTile(all, span(0, seq/2)),
		"some keys":    farTile(all, span(128, 256)),
		"half queries": farTile(span(seq/2, seq), all),
		"window":       {wholeTile(seq, partition.Band{Lo: -100})},
		"two tiles":    {wholeTile(200, causal), {Q: last, K: last, Band: causal}},
		"none":         nil,
	}
	for _, packed := range []bool{false, true} {
		r := newFused(t, FusedOptions{Packed: packed})
		rows := allRows(seq)
		view := func(heads int) View { return r.put(t, noise(seq*heads*dim, heads), rows, heads, dim) }
		float := func(heads, dim int) View { return r.empty(t, tensor.F32, seq, heads, dim) }
		q, k, v, do, o := view(heads), view(kvHeads), view(kvHeads), view(heads), r.empty(t, tensor.BF16, seq, heads, dim)
		acc := attention.Partial{O: float(heads, dim), LSE: float(heads, 1)}
		keys := func() View { return float(kvHeads, dim) }
		dq := float(heads, dim)
		g, src := attention.KeyGrads{DK: keys(), DV: keys()}, attention.KeyGrads{DK: keys(), DV: keys()}
		p := attention.Softmax{Scale: 1 / math.Sqrt(dim)}
		forward, err := r.Forward(o, acc, q, p)
		check(t, err)
		check(t, forward.Block(attention.Block{K: k, V: v, Tiles: cases["causal"], First: true, Last: true}))
		check(t, forward.End())
		saved := attention.Saved{O: o, LSE: acc.LSE, Delta: float(heads, 1)}
		begin := func() attention.BackwardPass {
			pass, err := r.Backward(dq, do, q, saved, p)
			check(t, err)
			return pass
		}
		block := func(g attention.KeyGrads, tiles []partition.Tile, fresh int, next bool) attention.GradBlock {
			return attention.GradBlock{Block: attention.Block{K: k, V: v, Tiles: tiles}, KeyGrads: g, Fresh: span(0, fresh),
				FoldNext: next}
		}
		// Received gradients may have any values.
		from := begin()
		check(t, from.Block(block(src, cases["causal"], seq, false)))
		check(t, from.End())
		fold := attention.Fold{Dst: g.Rows(0, hi), Lo: lo, Src: src.Rows(lo, hi)}
		run := func(tiles []partition.Tile, reset, next, late bool) (dk, dv []float64) {
			pass, fresh := begin(), seq
			if !reset { // the gradients are initialised
				check(t, pass.Block(block(g, nil, seq, false)))
				check(t, pass.Fold(attention.Fold{Dst: g, Src: attention.KeyGrads{DK: src.DV, DV: src.DK}}))
				fresh = 0
			}
			check(t, pass.Block(block(g, tiles, fresh, next)))
			if late {
				check(t, pass.End())
			}
			check(t, pass.Fold(fold))
			if !late {
				check(t, pass.End())
			}
			check(t, r.stream.Sync(context.Background()))
			dk, dv = make([]float64, seq*kvHeads*dim), make([]float64, seq*kvHeads*dim)
			r.get(t, g.DK, dk, rows)
			r.get(t, g.DV, dv, rows)
			return dk, dv
		}
		for name, tiles := range cases {
			if packed && len(tiles) == 1 { // every shape takes several plans
				continue
			}
			for _, reset := range []bool{true, false} {
				wantK, wantV := run(tiles, reset, false, false)
				for how, late := range map[string]bool{"at once": false, "late": true} {
					gotK, gotV := run(tiles, reset, true, late)
					same := func(what string, got, want []float64) {
						if err := near.Each(got, want, near.Finite,
							func(i int) float64 { return 1e-5 * (1 + math.Abs(want[i])) }); err != nil {
							t.Errorf("packed %t, %s, %s, reset %t: %s: %v", packed, name, how, reset, what, err)
						}
					}
					same("dk", gotK, wantK)
					same("dv", gotV, wantV)
				}
			}
		}
	}
}
