package call

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

type tiles = []partition.Tile

var causal, full = partition.Band{Lo: -partition.Unbounded}, partition.Full()

func span(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }

func tile(q0, q1, k0, k1 int, band partition.Band) partition.Tile {
	return partition.Tile{Q: span(q0, q1), K: span(k0, k1), Band: band}
}

// doc returns the tile of a document.
func doc(lo, hi int, band partition.Band) partition.Tile { return tile(lo, hi, lo, hi, band) }

// flashOf returns a call of both passes, with four query heads to a KV head. Its tensors have no memory.
func flashOf(seqQ, seqK, kvHeads, dim int, list ...partition.Tile) Flash {
	queries := func(t tensor.DType) View { return tensor.NewMeter().Alloc(t, 1, seqQ, 4*kvHeads, dim) }
	keys := func(t tensor.DType) View { return tensor.NewMeter().Alloc(t, 1, seqK, kvHeads, dim) }
	return Flash{Tiles: list, Tensors: Tensors{
		Q: queries(tensor.BF16), K: keys(tensor.BF16), V: keys(tensor.BF16), DO: queries(tensor.BF16),
		O: queries(tensor.F32), DQ: queries(tensor.F32), DK: keys(tensor.F32), DV: keys(tensor.F32),
	}}
}

// TestHasOrder checks for which tiles blocks of keys can add in the order of their queries.
func TestHasOrder(t *testing.T) {
	s, _ := source.HopperShapeFor(128, 128)
	for _, c := range []struct {
		name  string
		tiles tiles
		want  bool
	}{
		{"none", nil, true},
		{"one", tiles{doc(0, 500, full)}, true},
		{"documents that share blocks", tiles{doc(0, 100, full), doc(100, 130, full), doc(130, 500, full)}, true},
		{"the same queries, other blocks", tiles{tile(0, 500, 0, 128, full), tile(0, 500, 128, 256, full)}, true},
		{"the same queries and a block", tiles{tile(0, 500, 0, 100, full), tile(0, 500, 100, 256, full)}, false},
		{"back, in a block", tiles{tile(250, 500, 0, 100, full), tile(0, 250, 100, 256, full)}, false},
		{"back, in another block", tiles{tile(250, 500, 0, 128, full), tile(0, 250, 128, 256, full)}, true},
		{"queries one after the other", tiles{tile(250, 500, 0, 256, full), tile(0, 250, 0, 256, full)}, true},
		{"behind a short tile", tiles{tile(250, 500, 0, 256, full), tile(500, 510, 130, 140, full),
			tile(0, 200, 150, 256, full)}, false},
	} {
		f := flashOf(512, 512, 1, 8, c.tiles...)
		if got := f.HasOrder(s); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// TestWalks lists which deterministic calls go over all heads at each step.
func TestWalks(t *testing.T) {
	window := partition.Band{Lo: -1000}
	for _, c := range []struct {
		name        string
		dim         int
		tiles       tiles
		folds, walk bool
	}{
		{"causal", 128, tiles{doc(0, 4096, causal)}, true, true},
		{"no mask", 128, tiles{doc(0, 4096, full)}, false, true},
		{"window", 128, tiles{doc(0, 4096, window)}, false, false},
		{"window of head dim 64", 64, tiles{doc(0, 4096, window)}, false, true},
		{"two windows", 128, tiles{tile(0, 4096, 0, 2048, window), tile(0, 4096, 2048, 4096, window)}, false, true},
	} {
		s, _ := source.HopperShapeFor(c.dim, c.dim)
		f := flashOf(4096, 4096, 2, c.dim, c.tiles...)
		if o := f.orderOf(s, 132); o.fold > 0 != c.folds || o.beside > 0 != c.walk {
			t.Errorf("%s: %+v, want fold %t, all heads at each step %t", c.name, o, c.folds, c.walk)
		}
	}
}

// TestBanded checks which tiles let a block wait for the block before it in the rows of that block alone.
func TestBanded(t *testing.T) {
	shape, _ := source.HopperShapeFor(128, 128) // blocks of 128 keys
	window := partition.Band{Lo: -99}
	for _, c := range []struct {
		name  string
		tiles tiles
		want  bool
	}{
		{"causal", tiles{doc(0, 512, causal)}, true},
		{"a window", tiles{doc(0, 512, window)}, true},
		{"no mask", tiles{doc(0, 512, full)}, true},
		{"documents", tiles{doc(0, 70, causal), doc(70, 100, causal), doc(100, 512, causal)}, true},
		{"two windows", tiles{doc(0, 256, window), doc(256, 512, window)}, true},
		{"keys of another rank before its own", tiles{tile(0, 256, 0, 256, full),
			tile(0, 256, 256, 512, partition.Band{Lo: -partition.Unbounded, Hi: 256})}, true},
		{"a document in two parts", tiles{doc(0, 128, causal), tile(256, 384, 0, 128, full), doc(128, 256, causal),
			doc(256, 384, causal)}, false},
		{"later keys see earlier queries", tiles{tile(0, 256, 0, 128, full), tile(256, 512, 128, 256, full),
			tile(0, 256, 256, 384, full)}, false},
		{"the block before sees fewer queries", tiles{tile(0, 256, 0, 128, full), tile(0, 128, 128, 256, full),
			tile(0, 256, 256, 384, full)}, false},
		{"the block before sees queries around", tiles{tile(0, 384, 0, 128, full), tile(0, 128, 128, 256, full),
			tile(256, 384, 128, 256, full), tile(128, 256, 256, 384, full)}, false},
		{"later keys see more of earlier queries", tiles{tile(0, 256, 0, 128, full), tile(128, 256, 128, 256, full),
			tile(0, 256, 256, 384, full)}, false},
	} {
		f := flashOf(512, 512, 1, 128, c.tiles...)
		if got := f.HopperOrdered(shape, SMs{132, 132}, partition.Range{}).Params.Banded == 1; got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// TestLongestFirst checks that blocks with more steps come first, and that the result is nil if that is the default
// order.
func TestLongestFirst(t *testing.T) {
	for _, c := range []struct {
		tiles tiles
		want  string
	}{
		{tiles{doc(0, 512, causal)}, "[]"},
		{tiles{doc(0, 384, causal), doc(384, 512, causal)}, "[2 1 3 0]"},
		{tiles{doc(0, 128, causal), doc(128, 256, causal), doc(256, 384, causal), doc(384, 512, causal)}, "[]"},
		{tiles{doc(256, 512, causal)}, "[]"},
		{tiles{doc(0, 256, causal)}, "[1 0 3 2]"},
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
	for _, c := range []struct {
		q, k  int
		tiles tiles
		want  []int // keys of the launches
	}{
		{400, 400, tiles{doc(0, 400, causal)}, []int{100, 100, 100, 100}},
		{400, 150, tiles{tile(0, 400, 0, 150, full)}, []int{75, 75}},
		{400, 100, tiles{tile(0, 400, 0, 100, full)}, []int{100}},
		{400, 400, tiles{doc(0, 400, partition.Band{Lo: -99})}, []int{400}},
		{100, 400, tiles{tile(0, 50, 0, 90, full), tile(50, 100, 210, 400, full)}, []int{90, 90, 100}},
	} {
		f := flashOf(c.q, c.k, 1, 8, c.tiles...)
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

// TestFold checks the number of blocks of keys that run from the shortest to the longest, and the number of concurrent
// heads.
func TestFold(t *testing.T) {
	for _, c := range []struct{ blocks, heads, sms, fold, beside int }{
		{128, 8, 132, 64, 2}, {256, 8, 132, 128, 1}, {512, 8, 132, 128, 1}, {64, 8, 132, 32, 4}, {1, 1, 132, 1, 1},
		{6, 3, 4, 3, 1}, {100000, 8, 132, 132, 1},
	} {
		if fold, beside := fold(c.blocks, c.heads, c.sms); fold != c.fold || beside != c.beside {
			t.Errorf("%d blocks of %d heads, %d SMs: %d and %d, want %d and %d", c.blocks, c.heads, c.sms, fold, beside,
				c.fold, c.beside)
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
		end := c.first + c.queries
		f := flashOf(end, end, 8, 128, tile(c.first, end, 0, end, causal))
		if o := f.sweeps(s, 132); o.beside != c.beside {
			t.Errorf("keys from %d, %d queries: %d heads beside one another, want %d", c.first, c.queries, o.beside, c.beside)
		}
	}
}

// TestHopperDocuments checks which calls go over all heads at each step, and in which order of blocks.
func TestHopperDocuments(t *testing.T) {
	const sms = 5
	s, _ := source.HopperShapeFor(128, 128)
	window := partition.Band{Lo: -100}
	for _, c := range []struct {
		name   string
		beside int32
		order  []int32 // nil: ascending
		tiles  tiles
	}{
		{"one document, whose blocks do not fill the SMs", 0, nil, tiles{doc(0, 640, causal)}},
		{"documents, the longest last", 1, []int32{2, 3, 4, 5, 0, 1}, tiles{doc(0, 256, causal), doc(256, 768, causal)}},
		{"of equal length, one after another", 1, nil, tiles{doc(0, 384, causal), doc(384, 768, causal)}},
		{"a block with parts of two", 1, []int32{1, 2, 3, 0}, tiles{doc(0, 192, causal), doc(192, 512, causal)}},
		{"the later part of one, whose first keys another rank has", 1, []int32{0, 1, 2, 4, 5, 6},
			tiles{doc(0, 384, causal), tile(384, 640, 512, 640, full),
				tile(384, 640, 640, 896, partition.Band{Lo: -partition.Unbounded, Hi: 256})}},
		{"more blocks than run at once", 0, []int32{2, 3, 4, 5, 0, 6, 1, 7},
			tiles{doc(0, 256, causal), doc(256, 1024, causal)}},
		{"windows", 0, []int32{0, 1, 2, 4, 5, 6, 3, 7}, tiles{doc(0, 512, window), doc(512, 1024, window)}},
		{"no causal mask", 0, nil, tiles{doc(0, 256, full), doc(256, 512, full)}},
	} {
		rows := 0
		for _, x := range c.tiles {
			rows = max(rows, x.Q.Hi, x.K.Hi)
		}
		f := flashOf(rows, rows, 8, 128, c.tiles...)
		l := f.HopperBackward(s, SMs{sms, sms}, partition.Range{})
		if l.Params.Beside != c.beside || !slices.Equal(l.Lists.Order, c.order) {
			t.Errorf("%s: beside %d, order %v; want %d, %v", c.name, l.Params.Beside, l.Lists.Order, c.beside, c.order)
		}
	}
}

// TestGates checks the gates for which blocks wait, and that blocks of queries with gates come last.
func TestGates(t *testing.T) {
	s, _ := source.HopperShapeFor(128, 128)
	a, b := tensor.Gate{Word: 1 << 40, Count: 5}, tensor.Gate{Word: 1<<40 + 8, Count: 7}
	f := flashOf(512, 1024, 2, 128, tile(0, 256, 0, 300, full), tile(256, 384, 300, 640, full),
		tile(384, 512, 640, 1024, partition.Band{Lo: -partition.Unbounded, Hi: 256})) // aligned to both ends: 512
	f.Gates = []attention.Gate{{Rows: span(300, 310), Gate: a}, {Rows: span(310, 400), Gate: b},
		{Rows: span(640, 700), Gate: a}}
	forward, ok := f.HopperForward(s, View{}, true, false)
	if !ok {
		t.Fatal("nothing to do")
	}
	gates := []source.HopperGate{
		{At: [2]uint32{0, 256}, Count: [2]uint32{5, 0}},
		{At: [2]uint32{8, 256}, Count: [2]uint32{7, 0}},
	}
	if l := forward.Lists; !slices.Equal(l.Needs, []uint32{0, 0, 3, 1}) || !slices.Equal(l.Gates, gates) ||
		forward.Params.Early != 2 {
		t.Errorf("forward: needs %v of %v, %d early", l.Needs, l.Gates, forward.Params.Early)
	}
	for i, block := range forward.Lists.Order {
		if late := forward.Lists.Needs[block] != 0; late != (i >= int(forward.Params.Early)) {
			t.Errorf("forward: blocks come in the order %v", forward.Lists.Order)
		}
	}
	backward := f.HopperBackward(s, SMs{132, 132}, partition.Range{})
	if l := backward.Lists; !slices.Equal(l.Needs, []uint32{0, 0, 3, 2, 0, 1, 0, 0}) || !slices.Equal(l.Gates, gates) {
		t.Errorf("backward: needs %v of %v", l.Needs, l.Gates)
	}
	// Blocks also wait for keys in their last step that no query sees, since the values must not be NaN.
	f.Tiles = tiles{tile(0, 128, 0, 1024, partition.Band{Lo: -partition.Unbounded, Hi: 10})}
	f.Gates = []attention.Gate{{Rows: span(170, 180), Gate: a}}
	if forward, _ = f.HopperForward(s, View{}, true, false); forward.Lists.Needs[0] != 1 {
		t.Error("values that the last step brings may not be there yet")
	}
	for i := range 40 {
		f.Gates = append(f.Gates, attention.Gate{Rows: span(i, i+1), Gate: tensor.Gate{Word: uint64(i)}})
	}
	if within, before := HopperWaits(f.Gates); len(within) != source.HopperGates ||
		len(before) != 41-source.HopperGates {
		t.Errorf("of 41 gates %d are waited for in the kernel, and %d before", len(within), len(before))
	}
}
