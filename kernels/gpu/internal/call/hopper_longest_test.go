//go:build cuda

package call

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// TestLongestFirst checks that blocks with more steps come first, and that the result is nil if that is the default
// order.
func TestLongestFirst(t *testing.T) {
	causal := func(cuts ...int) (tiles []partition.Tile) {
		for i := range len(cuts) - 1 {
			r := partition.Range{Lo: cuts[i], Hi: cuts[i+1]}
			tiles = append(tiles, partition.Tile{Q: r, K: r, Band: partition.Band{Lo: -partition.Unbounded}})
		}
		return tiles
	}
	for _, c := range []struct {
		tiles []partition.Tile
		want  string
	}{
		{causal(0, 512), "[]"},
		{causal(0, 384, 512), "[2 1 3 0]"},
		{causal(0, 128, 256, 384, 512), "[]"},
		{causal(256, 512), "[]"},
		{causal(0, 256), "[1 0 3 2]"},
	} {
		if got := fmt.Sprint(longestFirst(stepsOf(ownTiles(c.tiles, false), 4, 128, 64), true)); got != c.want {
			t.Errorf("%v: %s, want %s", c.tiles, got, c.want)
		}
	}
}

// TestShortLast checks the number of the shortest blocks of all heads that come last.
func TestShortLast(t *testing.T) {
	for _, c := range []struct {
		steps            []int
		heads, sms, most int
		want             int
	}{
		{[]int{8, 7, 6, 5, 4, 3, 2, 1}, 2, 2, 8, 3},    // 2 (1 + 2 + 3) are one and a half times 4, on 2 SMs
		{[]int{1, 5, 0, 3, 0, 8}, 2, 2, 8, 3},          // 2 (1 + 3 + 5) are more than 2 times 8; 0 is no block
		{[]int{8, 7, 6, 5, 4, 3, 2, 1}, 2, 2, 2, 2},    // none with more than 2 steps
		{[]int{8, 8, 8, 8}, 1, 132, 8, 4},              // fewer blocks than SMs
		{[]int{8, 8, 8, 8}, 8, 132, 7, 0},              // all have more than 7 steps
		{[]int{66, 66, 66, 50, 30, 10}, 100, 1, 99, 1}, // one is enough
	} {
		if got := shortLast(c.steps, c.heads, c.sms, c.most); got != c.want {
			t.Errorf("%v: %d, want %d", c, got, c.want)
		}
	}
}

// TestSections checks that launches divide the keys, evenly, where queries see many of them.
func TestSections(t *testing.T) {
	span := func(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	causal, window := partition.Band{Lo: -partition.Unbounded}, partition.Band{Lo: -99}
	for _, c := range []struct {
		q, k  int
		tiles []partition.Tile
		want  []int // keys of the launches
	}{
		{400, 400, []partition.Tile{{Q: span(0, 400), K: span(0, 400), Band: causal}}, []int{100, 100, 100, 100}},
		{400, 150, []partition.Tile{{Q: span(0, 400), K: span(0, 150), Band: partition.Full()}}, []int{75, 75}},
		{400, 100, []partition.Tile{{Q: span(0, 400), K: span(0, 100), Band: partition.Full()}}, []int{100}},
		{400, 400, []partition.Tile{{Q: span(0, 400), K: span(0, 400), Band: window}}, []int{400}},
		{100, 400, []partition.Tile{{Q: span(0, 50), K: span(0, 90), Band: partition.Full()},
			{Q: span(50, 100), K: span(210, 400), Band: partition.Full()}}, []int{90, 90, 100}},
	} {
		f := Flash{Tensors: Tensors{
			Q: tensor.New(tensor.BF16, 1, c.q, 1, 8), K: tensor.New(tensor.BF16, 1, c.k, 1, 8),
		}, Tiles: c.tiles}
		var got []int
		pairs, end := 0, 0
		for _, tiles := range f.Sections(100) {
			var keys partition.Range
			for _, x := range tiles {
				keys = keys.Hull(x.K)
			}
			if keys.Lo < end {
				t.Errorf("%v: keys %v after %d", c, keys, end)
			}
			got, end = append(got, keys.Len()), keys.Hi
			pairs += partition.Pairs(tiles)
		}
		if !slices.Equal(got, c.want) || pairs != partition.Pairs(c.tiles) {
			t.Errorf("%v: keys %v, %d pairs", c, got, pairs)
		}
	}
}

// TestShortLastEvens simulates the SMs' choice of blocks, and checks that SMs finish at about the same time.
func TestShortLastEvens(t *testing.T) {
	const heads, sms = 8, 132
	causal := func(blocks, window int) (steps []int) {
		for b := range blocks {
			steps = append(steps, 4*min(2*(blocks-b), window))
		}
		return steps
	}
	for _, c := range []struct {
		steps []int
		least float64 // smallest share of the time that SMs are busy
	}{{causal(64, 1000), 0.98}, {causal(128, 1000), 0.99}, {causal(256, 1000), 0.995}, {causal(256, 66), 0.99}} {
		n := shortLast(c.steps, heads, sms, 256)
		var order []int
		for range heads {
			order = append(order, c.steps[:len(c.steps)-n]...)
		}
		for _, s := range c.steps[len(c.steps)-n:] {
			for range heads {
				order = append(order, s)
			}
		}
		ends, sum := make([]int, sms), 0
		for _, s := range order {
			first := 0
			for i := range ends {
				if ends[i] < ends[first] {
					first = i
				}
			}
			ends[first] += s
			sum += s
		}
		if got := float64(sum) / float64(sms*slices.Max(ends)); got < c.least {
			t.Errorf(
				"%d blocks of up to %d steps: at work for %.3f of the time, want %.3f",
				len(c.steps),
				c.steps[0],
				got,
				c.least,
			)
		}
	}
}

// TestFreeTurnsOnHost runs blocks of keys with different numbers of visible queries, of which the shortest of all heads
// come last, and some have none.
func TestFreeTurnsOnHost(t *testing.T) {
	h := newHost(t)
	span := func(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	causal := partition.Band{Lo: -partition.Unbounded}
	for _, c := range []struct {
		sms, together, blocks int
		fresh                 bool // the kernel sets gradients of fresh keys
		part                  bool // only some keys are fresh
		short                 bool // run with -short
		tiles                 []partition.Tile
	}{
		{1, 2, 3, true, false, false, []partition.Tile{{Q: span(0, 300), K: span(0, 300), Band: causal}}},
		{1, 1, 3, true, false, true, []partition.Tile{{Q: span(0, 130), K: span(0, 130), Band: causal},
			{Q: span(130, 300), K: span(140, 300), Band: partition.Full()}}},
		{1, 0, 2, false, true, true, []partition.Tile{{Q: span(0, 100), K: span(0, 100), Band: causal},
			{Q: span(100, 300), K: span(260, 300), Band: partition.Full()}}},
		{8, 3, 3, true, true, true, []partition.Tile{{Q: span(0, 300), K: span(0, 300), Band: partition.Full()}}},
		{2, 0, 3, true, false, true, []partition.Tile{{Q: span(0, 300), K: span(0, 300), Band: causal}}},
		{2, 2, 3, true, true, true, []partition.Tile{{Q: span(128, 300), K: span(0, 300), Band: causal}}},
		{2, 1, 3, true, true, true, []partition.Tile{{Q: span(0, 70), K: span(0, 70), Band: causal},
			{Q: span(70, 300), K: span(70, 300), Band: causal}}}, // all heads at each step
	} {
		if testing.Short() && !c.short {
			continue
		}
		k := &hostFlash{h, false, large}
		rig := k.rig()
		rig.Kernel = hostHopper{hostFlash: k, sms: c.sms}
		x := attentiontest.Case{
			Batch: 2, Heads: 4, KVHeads: 2, Dim: 64, DimV: 64, SeqQ: 300, SeqK: 300, Softmax: attention.Softmax{Scale: 0.125},
			Tiles:   c.tiles,
			Started: c.part, PartFresh: c.part,
		}
		attentiontest.Check(t, rig, x, tensor.BF16)

		like := func(heads int, dtype tensor.DType) View { return tensor.New(dtype, 2, 300, heads, 64) }
		f := Flash{Tiles: c.tiles, Softmax: x.Softmax, Tensors: Tensors{
			Q: like(
				4,
				tensor.BF16,
			), K: like(2, tensor.BF16), V: like(2, tensor.BF16), DO: like(4, tensor.BF16), DQ: like(4, tensor.F32),
			DK: like(2, tensor.F32), DV: like(2, tensor.F32),
		}}
		s, _ := source.HopperShapeFor(64, 64)
		l := f.HopperBackward(s, SMs{c.sms, c.sms}, span(0, 300))
		if int(l.Params.Together) != c.together || int(l.Params.Blocks) != c.blocks || l.SetsFresh != c.fresh {
			t.Errorf("%v: %d of %d blocks together, fresh %t", c.tiles, l.Params.Together, l.Params.Blocks, l.SetsFresh)
		}
	}
}

// TestHopperOrders checks that the order of a head has every block with a step exactly once.
func TestHopperOrders(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		steps := make([]int, 1+rng.IntN(12))
		for i := range steps {
			steps[i] = rng.IntN(5)
		}
		order := longestFirst(steps, false)
		if order == nil {
			for i := range steps {
				order = append(order, int32(i))
			}
		}
		seen := map[int32]bool{}
		for i, b := range order[:working(steps)] {
			if seen[b] || steps[b] == 0 || i > 0 && steps[order[i-1]] < steps[b] {
				t.Fatalf("%v: %v", steps, order)
			}
			seen[b] = true
		}
	}
}

// TestHopperSweeps checks which calls fold, with 8 KV heads on 132 SMs.
func TestHopperSweeps(t *testing.T) {
	s, _ := source.HopperShapeFor(128, 128)
	for _, c := range []struct {
		first, queries int // of the keys; the keys of the other queries come before
		beside         int
	}{
		{0, 4096, 8}, {0, 8192, 4}, {0, 16384, 2}, {0, 32768, 1},
		{0, 65536, 0},    // half of a head's blocks do not run at once
		{0, 11264, 0},    // three heads beside one another leave two
		{0, 14336, 0},    // 112 of 132 SMs
		{4096, 12288, 0}, // the blocks of earlier keys see all queries
	} {
		like := func(rows, heads int) View { return tensor.New(tensor.BF16, 1, rows, heads, 128) }
		keys := partition.Range{Hi: c.first + c.queries}
		f := Flash{
			Tiles: []partition.Tile{{Q: partition.Range{Lo: c.first, Hi: keys.Hi}, K: keys,
				Band: partition.Band{Lo: -partition.Unbounded}}},
			Tensors: Tensors{Q: like(keys.Hi, 32), K: like(keys.Hi, 8)},
		}
		if o := f.sweeps(s, 132); o.beside != c.beside {
			t.Errorf("keys from %d, %d queries: %d heads beside one another, want %d", c.first, c.queries, o.beside, c.beside)
		}
	}
}

// TestHopperDocuments checks which calls go over all heads at each step, and in which order of blocks.
func TestHopperDocuments(t *testing.T) {
	const sms = 5
	s, _ := source.HopperShapeFor(128, 128)
	span := func(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	causal := partition.Band{Lo: -partition.Unbounded}
	doc := func(band partition.Band, lo, hi int) partition.Tile {
		return partition.Tile{Q: span(lo, hi), K: span(lo, hi), Band: band}
	}
	window := partition.Band{Lo: -100}
	for _, c := range []struct {
		name   string
		beside int32
		order  []int32 // nil: ascending
		tiles  []partition.Tile
	}{
		{"one document, whose blocks do not fill the SMs", 0, nil, []partition.Tile{doc(causal, 0, 640)}},
		{"documents, the longest last", 1, []int32{2, 3, 4, 5, 0, 1},
			[]partition.Tile{doc(causal, 0, 256), doc(causal, 256, 768)}},
		{"of equal length, one after another", 1, nil,
			[]partition.Tile{doc(causal, 0, 384), doc(causal, 384, 768)}},
		{"a block with parts of two", 1, []int32{1, 2, 3, 0},
			[]partition.Tile{doc(causal, 0, 192), doc(causal, 192, 512)}},
		{"the later part of one, whose first keys another rank has", 1, []int32{0, 1, 2, 4, 5, 6},
			[]partition.Tile{doc(causal, 0, 384), {Q: span(384, 640), K: span(512, 640), Band: partition.Full()},
				{Q: span(384, 640), K: span(640, 896), Band: partition.Band{Lo: -partition.Unbounded, Hi: 256}}}},
		{"more blocks than run at once", 0, []int32{2, 3, 4, 5, 0, 6, 1, 7},
			[]partition.Tile{doc(causal, 0, 256), doc(causal, 256, 1024)}},
		{"windows", 0, []int32{0, 1, 2, 4, 5, 6, 3, 7}, []partition.Tile{doc(window, 0, 512), doc(window, 512, 1024)}},
		{"no causal mask", 0, nil, []partition.Tile{doc(partition.Full(), 0, 256), doc(partition.Full(), 256, 512)}},
	} {
		rows := 0
		for _, x := range c.tiles {
			rows = max(rows, x.Q.Hi, x.K.Hi)
		}
		like := func(heads int, dtype tensor.DType) View { return tensor.New(dtype, 1, rows, heads, 128) }
		f := Flash{Tiles: c.tiles, Tensors: Tensors{
			Q: like(32, tensor.BF16), K: like(8, tensor.BF16), V: like(8, tensor.BF16), DO: like(32, tensor.BF16),
			DQ: like(32, tensor.F32), DK: like(8, tensor.F32), DV: like(8, tensor.F32),
		}}
		l := f.HopperBackward(s, SMs{sms, sms}, partition.Range{})
		if l.Params.Beside != c.beside || !slices.Equal(l.Lists.Order, c.order) {
			t.Errorf("%s: beside %d, order %v; want %d, %v", c.name, l.Params.Beside, l.Lists.Order, c.beside, c.order)
		}
	}
}
