package call

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A turnOf is the result of turns.turn, a copy of turn in hopper_backward.cuh. TestTurnsOnHost runs the original.
type turnOf struct {
	keys, head, before int
	behind             bool
}

// turns adds to an order whether blocks wait only in rows of the block before.
type turns struct {
	order
	banded bool
}

func (o turns) turn(number, heads int) turnOf {
	if o.fold == 0 {
		keys := number % o.blocks
		return turnOf{keys, number / o.blocks, keys - 1, !o.banded}
	}
	first := number / (2 * o.fold * heads) * 2 * o.fold
	number -= first * heads
	count := min(2*o.fold, o.blocks-first)
	half := (count + 1) / 2
	head := number / (count * o.beside) * o.beside
	beside := min(o.beside, heads-head)
	number -= head * count
	at := number / beside
	head += number % beside
	switch {
	case at == 0:
		return turnOf{first + half - 1, head, first - 1, first > 0}
	case at < half:
		return turnOf{first + half - 1 - at, head, first + half - at, first > 0}
	case at == half:
		return turnOf{first + half, head, first, false}
	}
	return turnOf{first + at, head, first + at - 1, false}
}

// An adder is a block of keys that adds to dQ like the kernel: down its visible rows, after another block.
type adder struct {
	turnOf
	rows   [2]int // first row, and the row after the last
	at     int    // number of additions so far
	beside bool   // in all query heads at each row; else in one head after another
}

// A place is a row of a query head, to which blocks of a KV head add.
type place struct{ head, query, row int }

// run lets blocks add in random order, limited to a number of concurrent blocks. It returns the order of blocks that
// have added to each place, or nil after a deadlock.
func (o turns) run(rng *rand.Rand, heads, queries, atOnce, rows int, sees func(keys int) [2]int) map[place][]int {
	added, progress := map[place][]int{}, map[[3]int]int{} // progress of a head, block of keys, and query head
	beside := rng.IntN(2) == 0
	var running []*adder
	for next := 0; ; {
		for ; next < o.blocks*heads && len(running) < atOnce; next++ {
			t := o.turn(next, heads)
			running = append(running, &adder{turnOf: t, rows: sees(t.keys), beside: beside})
		}
		if len(running) == 0 {
			return added
		}
		ready := slices.DeleteFunc(slices.Clone(running), func(a *adder) bool {
			behind := func(query, row int) bool { return progress[[3]int{a.head, a.before, query}] < rows-row }
			query, row, over := a.next(queries)
			if over {
				waits := false
				for query := range queries {
					waits = waits || behind(query, 0)
				}
				return a.before >= 0 && a.behind && waits
			}
			other := sees(max(a.before, 0))
			return a.before >= 0 && (a.behind || row >= other[0] && row < other[1]) && behind(query, row)
		})
		if len(ready) == 0 {
			return nil
		}
		a := ready[rng.IntN(len(ready))]
		if rng.IntN(2) == 0 {
			a = ready[len(ready)-1] // the latest blocks run first
		}
		query, row, over := a.next(queries)
		if over {
			for query := range queries {
				progress[[3]int{a.head, a.keys, query}] = rows
			}
			running = slices.DeleteFunc(running, func(b *adder) bool { return a == b })
			continue
		}
		p := place{a.head, query, row}
		added[p] = append(added[p], a.keys)
		progress[[3]int{a.head, a.keys, query}] = rows - row
		a.at++
	}
}

// next returns the place of the block's next addition; over reports that there is none.
func (a *adder) next(queries int) (query, row int, over bool) {
	n := a.rows[1] - a.rows[0]
	if a.at >= n*queries {
		return 0, 0, true
	}
	if a.beside {
		return a.at % queries, a.rows[1] - 1 - a.at/queries, false
	}
	return a.at / n, a.rows[1] - 1 - a.at%n, false
}

// TestTurns checks that blocks of keys add to every row in one order, for any speeds and any number of concurrent
// blocks, and that no block waits for one that starts later.
func TestTurns(t *testing.T) {
	const queries, each = 3, 2 // query heads of a group; rows for a block of keys
	for _, c := range []struct {
		name   string
		o      turns
		heads  int
		atOnce []int
		window int // visible rows of a block's last key; 0: all later rows
		doc    int // blocks to a document; 0: all
	}{
		{"fold", turns{order{blocks: 8, fold: 4, beside: 1}, true}, 1, []int{1, 8}, 0, 0},
		{"fold, in parts", turns{order{blocks: 9, fold: 2, beside: 2}, true}, 2, []int{1, 3, 5, 18}, 0, 0},
		{"fold, the last part short", turns{order{blocks: 13, fold: 3, beside: 2}, true}, 3, []int{2, 6, 11}, 0, 0},
		{"one by one", turns{order{blocks: 7}, true}, 2, []int{1, 4, 14}, 0, 0},
		{"a window", turns{order{blocks: 9}, true}, 2, []int{1, 4, 18}, 3, 0},
		{"several tiles", turns{order{blocks: 6}, false}, 2, []int{1, 5, 12}, 3, 0},
		{"documents", turns{order{blocks: 9}, true}, 2, []int{1, 5, 18}, 0, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			rows := each * c.o.blocks
			sees := func(keys int) [2]int {
				end := rows
				if c.window > 0 {
					end = min(rows, each*(keys+1)+c.window)
				}
				if c.doc > 0 { // its last block has the first rows of the next document
					end = min(rows, each*c.doc*((keys+1)/c.doc+1))
				}
				return [2]int{each * keys, end}
			}
			want := c.o.run(rand.New(rand.NewPCG(0, 0)), c.heads, queries, 1, rows, sees)
			for seed := range uint64(40) {
				for _, n := range c.atOnce {
					got := c.o.run(rand.New(rand.NewPCG(seed, uint64(n))), c.heads, queries, n, rows, sees)
					if got == nil {
						t.Fatalf("%d blocks at once, seed %d: all wait", n, seed)
					}
					for p, blocks := range want {
						if !slices.Equal(got[p], blocks) {
							t.Fatalf(
								"%d blocks at once, seed %d, row %d of query head %d: %v add, one after the other %v",
								n,
								seed,
								p.row,
								p.query,
								got[p],
								blocks,
							)
						}
					}
				}
			}
		})
	}
}

// TestHasOrder checks for which tiles blocks of keys can add in the order of their queries.
func TestHasOrder(t *testing.T) {
	s, _ := source.HopperShapeFor(128, 128)
	tile := func(keys, queries partition.Range) partition.Tile {
		return partition.Tile{
			Q:    queries,
			K:    keys,
			Band: partition.Band{Lo: -partition.Unbounded, Hi: partition.Unbounded},
		}
	}
	r := func(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	for _, c := range []struct {
		name  string
		tiles []partition.Tile
		want  bool
	}{
		{"none", nil, true},
		{"one", []partition.Tile{tile(r(0, 500), r(0, 500))}, true},
		{"documents that share blocks", []partition.Tile{tile(r(0, 100), r(0, 100)), tile(r(100, 130), r(100, 130)),
			tile(r(130, 500), r(130, 500))}, true},
		{"the same queries, other blocks", []partition.Tile{tile(r(0, 128), r(0, 500)), tile(r(128, 256), r(0, 500))}, true},
		{"the same queries and a block", []partition.Tile{tile(r(0, 100), r(0, 500)), tile(r(100, 256), r(0, 500))}, false},
		{"back, in a block", []partition.Tile{tile(r(0, 100), r(250, 500)), tile(r(100, 256), r(0, 250))}, false},
		{"back, in another block", []partition.Tile{tile(r(0, 128), r(250, 500)), tile(r(128, 256), r(0, 250))}, true},
		{"queries one after the other", []partition.Tile{tile(r(0, 256), r(250, 500)), tile(r(0, 256), r(0, 250))}, true},
		{"behind a short tile", []partition.Tile{tile(r(0, 256), r(250, 500)), tile(r(130, 140), r(500, 510)),
			tile(r(150, 256), r(0, 200))}, false},
	} {
		f := Flash{
			Tiles:   c.tiles,
			Tensors: Tensors{Q: tensor.New(tensor.F32, 1, 512, 4, 8), K: tensor.New(tensor.F32, 1, 512, 2, 8)},
		}
		if got := f.HasOrder(s); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// TestWalks lists which deterministic calls go over all heads at each step.
func TestWalks(t *testing.T) {
	all, half := partition.Range{Hi: 4096}, partition.Range{Lo: 2048, Hi: 4096}
	window := partition.Band{Lo: -1000}
	for _, c := range []struct {
		name        string
		dim         int
		tiles       []partition.Tile
		folds, walk bool
	}{
		{"causal", 128, []partition.Tile{{Q: all, K: all, Band: partition.Band{Lo: -partition.Unbounded}}}, true, true},
		{"no mask", 128, []partition.Tile{{Q: all, K: all, Band: partition.Full()}}, false, true},
		{"window", 128, []partition.Tile{{Q: all, K: all, Band: window}}, false, false},
		{"window of head dim 64", 64, []partition.Tile{{Q: all, K: all, Band: window}}, false, true},
		{"two windows", 128, []partition.Tile{{Q: all, K: partition.Range{Hi: 2048}, Band: window},
			{Q: all, K: half, Band: window}}, false, true},
	} {
		s, _ := source.HopperShapeFor(c.dim, c.dim)
		like := func(heads int) View { return tensor.New(tensor.BF16, 1, all.Hi, heads, c.dim) }
		f := Flash{Tiles: c.tiles, Tensors: Tensors{Q: like(8), K: like(2)}}
		if o := f.orderOf(s, 132); o.fold > 0 != c.folds || o.beside > 0 != c.walk {
			t.Errorf("%s: %+v, want fold %t, all heads at each step %t", c.name, o, c.folds, c.walk)
		}
	}
}

// TestBanded checks which tiles let a block wait for the block before it in the rows of that block alone.
func TestBanded(t *testing.T) {
	shape, _ := source.HopperShapeFor(128, 128) // blocks of 128 keys
	causal, full := partition.Band{Lo: -partition.Unbounded}, partition.Full()
	tile := func(klo, khi, qlo, qhi int, band partition.Band) partition.Tile {
		return partition.Tile{Q: partition.Range{Lo: qlo, Hi: qhi}, K: partition.Range{Lo: klo, Hi: khi}, Band: band}
	}
	for _, c := range []struct {
		name  string
		tiles []partition.Tile
		want  bool
	}{
		{"causal", []partition.Tile{tile(0, 512, 0, 512, causal)}, true},
		{"a window", []partition.Tile{tile(0, 512, 0, 512, partition.Band{Lo: -99})}, true},
		{"no mask", []partition.Tile{tile(0, 512, 0, 512, full)}, true},
		{"documents", []partition.Tile{tile(0, 70, 0, 70, causal), tile(70, 100, 70, 100, causal),
			tile(100, 512, 100, 512, causal)}, true},
		{"two windows", []partition.Tile{tile(0, 256, 0, 256, partition.Band{Lo: -99}),
			tile(256, 512, 256, 512, partition.Band{Lo: -99})}, true},
		{"keys of another rank before its own", []partition.Tile{tile(0, 256, 0, 256, full),
			tile(256, 512, 0, 256, partition.Band{Lo: -partition.Unbounded, Hi: 256})}, true},
		{"a document in two parts", []partition.Tile{tile(0, 128, 0, 128, causal), tile(0, 128, 256, 384, full),
			tile(128, 256, 128, 256, causal), tile(256, 384, 256, 384, causal)}, false},
		{"later keys see earlier queries", []partition.Tile{tile(0, 128, 0, 256, full), tile(128, 256, 256, 512, full),
			tile(256, 384, 0, 256, full)}, false},
		{"the block before sees fewer queries", []partition.Tile{tile(0, 128, 0, 256, full),
			tile(128, 256, 0, 128, full), tile(256, 384, 0, 256, full)}, false},
		{"the block before sees queries around", []partition.Tile{tile(0, 128, 0, 384, full),
			tile(128, 256, 0, 128, full), tile(128, 256, 256, 384, full), tile(256, 384, 128, 256, full)}, false},
		{"later keys see more of earlier queries", []partition.Tile{tile(0, 128, 0, 256, full),
			tile(128, 256, 128, 256, full), tile(256, 384, 0, 256, full)}, false},
	} {
		like := func(t tensor.DType) View { return tensor.New(t, 1, 512, 1, 128) }
		f := Flash{Tiles: c.tiles, Tensors: Tensors{
			Q: like(tensor.BF16), K: like(tensor.BF16), V: like(tensor.BF16), DO: like(tensor.BF16),
			DQ: like(tensor.F32), DK: like(tensor.F32), DV: like(tensor.F32),
		}}
		if got := f.HopperOrdered(shape, SMs{132, 132}, partition.Range{}).Params.Banded == 1; got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
