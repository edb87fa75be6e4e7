//go:build cuda

package kernels

import (
	"context"
	"math"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// TestFusedHold holds that gradients that wait for AddGrads become what Add makes of complete
// ones, also where another call comes between.
func TestFusedHold(t *testing.T) {
	const seq, heads, kvHeads, dim, lo, hi = 512, 4, 2, 64, 64, 320
	tile := func(q, k partition.Range, b partition.Band) partition.Tile {
		return partition.Tile{Q: q, K: k, Band: b}
	}
	all, causal := partition.Range{Hi: seq}, partition.Band{Lo: -partition.Unbounded}
	cases := map[string][]partition.Tile{
		"causal":       {tile(all, all, causal)},
		"half keys":    {tile(all, partition.Range{Hi: seq / 2}, partition.Full())},
		"some keys":    {tile(all, partition.Range{Lo: 128, Hi: 256}, partition.Full())},
		"half queries": {tile(partition.Range{Lo: seq / 2, Hi: seq}, all, partition.Full())},
		"window":       {tile(all, all, partition.Band{Lo: -100})},
		"two tiles":    {tile(partition.Range{Hi: 200}, partition.Range{Hi: 200}, causal), tile(partition.Range{Lo: 200, Hi: seq}, partition.Range{Lo: 200, Hi: seq}, causal)},
		"none":         nil,
	}
	for _, packed := range []bool{false, true} {
		r := newFused(t, FusedOptions{Packed: packed})
		rows := make([]int, seq)
		for i := range rows {
			rows[i] = i
		}
		view := func(heads int) View {
			xs := make([]uint16, seq*heads*dim)
			state := uint32(heads)
			for i := range xs {
				state = state*1664525 + 1013904223
				xs[i] = uint16(state>>31<<15 | 0x3f00 | state>>24&0x7f)
			}
			return r.put(t, xs, rows, heads, dim)
		}
		q, k, v, do, o := view(heads), view(kvHeads), view(kvHeads), view(heads), r.empty(t, tensor.BF16, 1, seq, heads, dim)
		acc := attention.Partial{O: r.empty(t, tensor.F32, 1, seq, heads, dim), LSE: r.empty(t, tensor.F32, 1, seq, heads, 1)}
		keys := func() View { return r.empty(t, tensor.F32, 1, seq, kvHeads, dim) }
		g, src := attention.Grads{DQ: r.empty(t, tensor.F32, 1, seq, heads, dim), DK: keys(), DV: keys()}, attention.Grads{DK: keys(), DV: keys()}
		part := func(x attention.Grads) attention.Grads {
			return attention.Grads{DK: x.DK.Slice(tensor.Seq, lo, hi), DV: x.DV.Slice(tensor.Seq, lo, hi)}
		}
		p := attention.Softmax{Scale: 1 / math.Sqrt(dim)}
		check(t, r.Reset(acc))
		check(t, r.Forward(acc, q, k, v, cases["causal"], p))
		check(t, r.Finish(o, acc))
		saved := attention.Saved{O: o, LSE: acc.LSE, Delta: r.empty(t, tensor.F32, 1, seq, heads, 1)}
		// What came from another rank may be any numbers.
		check(t, r.ResetGrads(attention.Grads{DK: src.DK, DV: src.DV, DQ: g.DQ}))
		check(t, r.Backward(attention.Grads{DQ: g.DQ, DK: src.DK, DV: src.DV}, do, q, k, v, saved, cases["causal"], p))
		run := func(reset bool, calls func()) (dk, dv []float64) {
			check(t, r.ResetGrads(attention.Grads{DQ: g.DQ}))
			check(t, r.ResetGrads(attention.Grads{DK: g.DK, DV: g.DV}))
			if !reset { // something is there already
				check(t, r.Add(g.DK, src.DV))
				check(t, r.Add(g.DV, src.DK))
			}
			calls()
			check(t, r.FinishGrads(attention.Grads{DQ: g.DQ}))
			check(t, r.stream.Sync(context.Background()))
			dk, dv = make([]float64, seq*kvHeads*dim), make([]float64, seq*kvHeads*dim)
			r.get(t, g.DK, dk, rows)
			r.get(t, g.DV, dv, rows)
			return dk, dv
		}
		backward := func(tiles []partition.Tile) { check(t, r.Backward(g, do, q, k, v, saved, tiles, p)) }
		for name, tiles := range cases {
			if packed && len(tiles) == 1 { // every shape costs plans
				continue
			}
			for _, reset := range []bool{true, false} {
				wantK, wantV := run(reset, func() {
					backward(tiles)
					check(t, r.Add(part(g).DK, part(src).DK))
					check(t, r.Add(part(g).DV, part(src).DV))
				})
				for how, between := range map[string]func(){
					"at once": func() {},
					"late":    func() { check(t, r.FinishGrads(attention.Grads{DQ: g.DQ})) },
				} {
					gotK, gotV := run(reset, func() {
						r.Hold(g)
						backward(tiles)
						between()
						check(t, r.AddGrads(part(g), part(src)))
					})
					near := func(what string, got, want []float64) {
						for i := range want {
							if !(math.Abs(got[i]-want[i]) <= 1e-5*(1+math.Abs(want[i]))) {
								t.Errorf("packed %t, %s, %s, reset %t: %s of element %d is %v, want %v", packed, name, how, reset, what, i, got[i], want[i])
								return
							}
						}
					}
					near("dk", gotK, wantK)
					near("dv", gotV, wantV)
				}
			}
		}
	}
}
