//go:build cuda

package call

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// badRow is a row of one input that holds a number that is not finite.
type badRow struct {
	input string
	row   int
	x     float64
}

// spread is an attention of one head dim over hops of keys, one input of which has a bad row.
type spread struct {
	dim, seqQ, seqK, hops int
	tiles                 []partition.Tile // of queries and all keys
	bad                   badRow
}

// hopTiles returns the tiles of hop n, whose keys begin at lo.
func (s spread) hopTiles(lo, hi int) (list []partition.Tile) {
	for _, t := range s.tiles {
		keys := partition.Range{Lo: max(t.K.Lo, lo) - lo, Hi: min(t.K.Hi, hi) - lo}
		if keys.Lo < keys.Hi {
			list = append(list, partition.Tile{Q: t.Q, K: keys, Band: partition.Band{Lo: t.Band.Lo - lo, Hi: t.Band.Hi - lo}})
		}
	}
	return list
}

// results are what a pass forward and one backward make, by name, in float64, rows in order.
func (s spread) results(t *testing.T, k attention.Kernel, dtype, sums tensor.DType, alloc func(tensor.DType, [4]int) View) map[string][]float64 {
	t.Helper()
	const heads, kvHeads = 2, 1
	rng := rand.New(rand.NewPCG(1, 2))
	input := func(name string, seq, heads int) View {
		v := alloc(dtype, [4]int{1, seq, heads, s.dim})
		fill(v, func(at [4]int) float64 {
			x := float64(tensor.FromBFloat(tensor.ToBFloat(float32(rng.NormFloat64()))))
			if name == s.bad.input && at[tensor.Seq] == s.bad.row && at[tensor.Dim] == 3 {
				return s.bad.x
			}
			return x
		})
		return v
	}
	output := func(dtype tensor.DType, seq, heads, dim int) View { return alloc(dtype, [4]int{1, seq, heads, dim}) }
	q, keys, v, do := input("q", s.seqQ, heads), input("k", s.seqK, kvHeads), input("v", s.seqK, kvHeads), input("do", s.seqQ, heads)
	o, delta := output(dtype, s.seqQ, heads, s.dim), output(sums, s.seqQ, heads, 1)
	acc := attention.Partial{O: output(sums, s.seqQ, heads, s.dim), LSE: output(sums, s.seqQ, heads, 1)}
	dq, dk, dv := output(sums, s.seqQ, heads, s.dim), output(sums, s.seqK, kvHeads, s.dim), output(sums, s.seqK, kvHeads, s.dim)
	p := attention.Softmax{Scale: 1 / math.Sqrt(float64(s.dim))}

	hop := func(n int) (attention.Block, partition.Range) {
		r := partition.Range{Lo: s.seqK * n / s.hops, Hi: s.seqK * (n + 1) / s.hops}
		return attention.Block{K: keys.Slice(tensor.Seq, r.Lo, r.Hi), V: v.Slice(tensor.Seq, r.Lo, r.Hi), Tiles: s.hopTiles(r.Lo, r.Hi), First: n == 0, Last: n == s.hops-1}, r
	}
	forward, err := k.Forward(o, acc, q, p)
	ok(t, err)
	for n := range s.hops {
		b, _ := hop(n)
		ok(t, forward.Block(b))
	}
	ok(t, forward.End())
	backward, err := k.Backward(dq, do, q, attention.Saved{O: o, LSE: acc.LSE, Delta: delta}, p)
	ok(t, err)
	for n := range s.hops {
		b, r := hop(n)
		grads := attention.KeyGrads{DK: dk.Slice(tensor.Seq, r.Lo, r.Hi), DV: dv.Slice(tensor.Seq, r.Lo, r.Hi)}
		ok(t, backward.Block(attention.GradBlock{Block: b, KeyGrads: grads, Fresh: partition.Range{Hi: r.Len()}}))
	}
	ok(t, backward.End())
	return map[string][]float64{"o": numbers(o), "lse": numbers(acc.LSE), "dq": numbers(dq), "dk": numbers(dk), "dv": numbers(dv)}
}

// fill sets the elements of v.
func fill(v View, f func(at [4]int) float64) {
	if v.DType() == tensor.F64 {
		data, n := tensor.Data[float64](v), v.Shape()
		for i := range data {
			data[i] = f([4]int{0, i / (n[2] * n[3]), i / n[3] % n[2], i % n[3]})
		}
		return
	}
	each(v, func(_ float32, at [4]int) float32 { return float32(f(at)) })
}

// numbers are the elements of v in order.
func numbers(v View) (list []float64) {
	if v.DType() == tensor.F64 {
		return tensor.Data[float64](v)
	}
	each(v, func(x float32, _ [4]int) float32 { list = append(list, float64(x)); return x })
	return list
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// reaches holds that what is not finite in the definition is not finite in a kernel's results, that only rows of the tiles of the bad row
// have more of it, and that rows see no key where the definition has them see none.
func (s spread) reaches(t *testing.T, k attention.Kernel, dtype tensor.DType, h *host) {
	t.Helper()
	want := s.results(t, attention.NewReference[float64](nil), tensor.F64, tensor.F64, func(dtype tensor.DType, n [4]int) View { return tensor.New(dtype, n[0], n[1], n[2], n[3]) })
	h.used = 0
	got := s.results(t, k, dtype, tensor.F32, func(dtype tensor.DType, n [4]int) View {
		m, err := h.alloc(int64(n[0] * n[1] * n[2] * n[3] * dtype.Size()))
		ok(t, err)
		return tensor.Dense(m, dtype, 0, n)
	})
	inTile := map[bool]map[int]bool{false: {}, true: {}} // the rows of keys, and of queries, that the bad row may reach
	for _, tile := range s.tiles {
		byKey := s.bad.input == "k" || s.bad.input == "v"
		if r := map[bool]partition.Range{false: tile.Q, true: tile.K}[byKey]; s.bad.row < r.Lo || s.bad.row >= r.Hi {
			continue
		}
		for i := tile.Q.Lo; i < tile.Q.Hi; i++ {
			inTile[true][i] = true
		}
		for j := tile.K.Lo; j < tile.K.Hi; j++ {
			inTile[false][j] = true
		}
	}
	for name, w := range want {
		queries := name == "o" || name == "lse" || name == "dq"
		rows := s.seqK
		if queries {
			rows = s.seqQ
		}
		lost, extra := 0, 0
		for i, x := range w {
			switch g := got[name][i]; {
			case math.IsInf(x, -1) && name == "lse":
				if g != x {
					t.Errorf("LSE %d is %v, want that of a row that sees no key", i, g)
				}
			case !finite(x) && finite(g), name == "lse" && math.IsInf(g, -1):
				lost++
			case finite(x) && !finite(g) && !inTile[queries][i/(len(w)/rows)]:
				extra++
			}
		}
		if lost+extra > 0 {
			t.Errorf("%s: of %d numbers, %d are finite that are not in the definition, and %d are not in rows that the bad one has no tile with", name, len(w), lost, extra)
		}
	}
}

// spreads are attentions with a bad row in each input.
func spreads(dim int, tiles []partition.Tile, seqQ, seqK, hops, row int) (list []spread) {
	for _, input := range []string{"q", "k", "v", "do"} {
		for _, x := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			list = append(list, spread{dim, seqQ, seqK, hops, tiles, badRow{input, row, x}})
		}
	}
	return list
}

func (s spread) String() string {
	return fmt.Sprintf("%d queries, %d keys, %d hops, %v in row %d of %s", s.seqQ, s.seqK, s.hops, s.bad.x, s.bad.row, s.bad.input)
}

// TestBadNumbersOnHost holds that NaN and infinities reach the results of every kernel, whatever hop brings them.
func TestBadNumbersOnHost(t *testing.T) {
	h := newHost(t)
	all := func(q, k int, lo, hi int) []partition.Tile {
		return []partition.Tile{{Q: partition.Range{Hi: q}, K: partition.Range{Hi: k}, Band: partition.Band{Lo: lo, Hi: hi}}}
	}
	full := all(70, 96, -partition.Unbounded, partition.Unbounded)
	causal := all(70, 96, -partition.Unbounded, 26)
	late := all(70, 96, -partition.Unbounded, -10) // the first rows see no key
	rest := []partition.Tile{{Q: partition.Range{Lo: 3, Hi: 50}, K: partition.Range{Lo: 10, Hi: 80}, Band: partition.Band{Lo: -partition.Unbounded, Hi: 40}}}
	for _, ordered := range []bool{false, true} {
		flash := &hostFlash{h, ordered, large}
		for _, k := range []struct {
			name  string
			k     attention.Kernel
			dtype tensor.DType
		}{
			{"hopper", hostHopper{hostFlash: flash, sms: 4}, tensor.BF16},
			{"flash", flash, tensor.BF16}, {"flash", flash, tensor.F32}, {"reference", &hostReference{*flash}, tensor.F32},
		} {
			t.Run(fmt.Sprintf("%s in %v, deterministic %t", k.name, k.dtype, ordered), func(t *testing.T) {
				h.t = t
				for _, list := range [][]spread{
					spreads(64, full, 70, 96, 3, 40), spreads(64, causal, 70, 96, 1, 60), spreads(64, late, 70, 96, 1, 33), spreads(64, rest, 70, 96, 1, 30),
				} {
					for i, s := range list {
						if testing.Short() && i%3 > 0 {
							continue
						}
						t.Run(s.String(), func(t *testing.T) { s.reaches(t, k.k, k.dtype, h) })
					}
				}
			})
		}
	}
}
