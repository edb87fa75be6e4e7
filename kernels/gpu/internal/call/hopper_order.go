package call

import (
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// HopperOrdered returns the launch of a deterministic HopperBackward: blocks of keys add to dQ in a fixed order. The
// order depends on the number of SMs. The call must satisfy HasOrder.
func (f *Flash) HopperOrdered(s source.HopperShape, sms SMs, fresh partition.Range) HopperBackward {
	l, steps := f.hopperBackward(s, true, fresh)
	if working(steps) == 0 {
		return l
	}
	sms = sms.clusters(s)
	o := f.orderOf(s, sms.Taken)
	l.Progress = o.blocks * f.Q.Len(tensor.Heads) * l.Grid[2] * s.KeyGroups * s.Blocks()
	p := &l.Params
	p.Start, p.Blocks, p.Fold, p.Beside = int32(o.start), int32(o.blocks), int32(o.fold), int32(o.beside)
	if banded(ownTiles(f.Tiles, true), s.OwnKeys(), o.start, o.blocks) {
		p.Banded = 1
	}
	l.share(s, o.blocks*f.K.Len(tensor.Heads), sms)
	l.Next = l.Grid[2]
	p.Polls = turnPolls
	if f.Gates != nil {
		p.Polls = 0 // the previous block may wait for a peer's rows, for which the host has a deadline
	}
	return l
}

// turnPolls limits a block's polls for its turn to about two minutes.
const turnPolls = 1 << 27

// HasOrder reports whether blocks of keys can add to dQ in order: each must visit the queries of a head once, from the
// last to the first.
func (f *Flash) HasOrder(s source.HopperShape) bool {
	keys := int32(s.OwnKeys())
	own := ownTiles(f.Tiles, true)
	for i, t := range own {
		block := t.OwnLo / keys * keys
		for j := i - 1; j >= 0 && own[j].Reach > block; j-- {
			if own[j].OwnHi > block && own[j].OtherHi > t.OtherLo {
				return false
			}
		}
	}
	return true
}

// An order describes the order of blocks of keys; see turn in hopper_backward.cuh. Without fold, beside is 1 if blocks
// go over all heads at each step. In windows that is slower, as measured, but not at head dim 64.
type order struct {
	start, blocks int
	fold, beside  int
}

// orderOf returns the order for a call's tiles.
func (f *Flash) orderOf(s source.HopperShape, sms int) order {
	own := ownTiles(f.Tiles, true)
	keys := s.OwnKeys()
	reach := int(own[len(own)-1].Reach)
	o := order{start: int(own[0].OwnLo) / keys}
	o.blocks = (reach+keys-1)/keys - o.start
	first, one := own[0], len(own) == 1
	window := one && int(first.OwnLo)+int(first.Hi)+1 < int(first.OtherHi)
	if one && shrinks(first) {
		o.fold, o.beside = fold(o.blocks, f.K.Len(tensor.Heads), sms)
	} else if !window || s.QK <= 64 {
		o.beside = 1
	}
	return o
}

// banded reports whether the rows to which a block and any earlier one add are rows of the block before it, as in
// windows and packed documents. Then a block waits in these rows alone.
func banded(own []source.FlashTile, keys, start, blocks int) bool {
	rows, count := make([]partition.Range, start+blocks), make([]int, start+blocks)
	for _, t := range own {
		eachBlock(t, start+blocks, keys, func(b, lo, hi int) {
			r := others(t, lo, hi, 1)
			rows[b], count[b] = rows[b].Hull(r), count[b]+r.Len()
		})
	}
	reach := 0 // of all earlier blocks
	for b := start; b < start+blocks; b++ {
		r := rows[b]
		shared := partition.Range{Lo: r.Lo, Hi: min(r.Hi, reach)}
		if count[b] != r.Len() || shared.Len() > 0 && (shared.Lo < rows[b-1].Lo || shared.Hi > rows[b-1].Hi) {
			return false
		}
		reach = max(reach, r.Hi)
	}
	return true
}

// sweeps returns the order with fold for a plain backward pass. Its fold is 0 if longest first is faster: a key sees as
// many queries as the key before, or the pairs of all blocks of some heads do not nearly fill the SMs.
func (f *Flash) sweeps(s source.HopperShape, sms int) order {
	o, t := f.orderOf(s, sms), ownTiles(f.Tiles, true)[0]
	if o.fold == 0 || t.OwnLo+t.Lo < t.OtherLo || 2*o.fold < o.blocks ||
		f.K.Len(tensor.Heads)%o.beside != 0 || 20*o.fold*o.beside < 19*sms {
		return order{}
	}
	return o
}

// documents reports whether most blocks of a plain backward pass are of short documents. Such blocks visit all heads of
// a group at each step. The blocks of a document begin at its last query, so if they run at once, its queries stay in
// the L2. Head by head, they would soon be at different heads. longest has the steps of the longest block of each
// block's document: in descending order of them, the blocks of a document are neighbours.
func (f *Flash) documents(s source.HopperShape, sms, blocks int) (longest []int, ok bool) {
	own, keys, short := ownTiles(f.Tiles, true), s.OwnKeys(), 0
	if len(own) == 1 {
		return nil, false
	}
	longest = make([]int, blocks)
	for _, t := range own {
		most, sum := 0, 0
		each := func(do func(b, n int)) {
			eachBlock(t, blocks, keys, func(b, lo, hi int) { do(b, others(t, lo, hi, s.Queries).Len()/s.Queries) })
		}
		each(func(_, n int) { most, sum = max(most, n), sum+n })
		each(func(b, n int) {
			if n > 0 {
				longest[b] = max(longest[b], most)
			}
		})
		switch {
		case t.OwnLo+t.Hi+1 < t.OtherHi || int(t.OwnHi-t.OwnLo) > sms*keys: // a window, or more blocks than run at once
			short -= sum
		case shrinks(t):
			short += sum
		}
	}
	return longest, short > 0
}

// shrinks reports whether the first key of a tile sees its last query, and the last key sees fewer than half as many
// queries as the first.
func shrinks(t source.FlashTile) bool {
	queries := func(key int) int {
		first := max(int(t.OtherLo), key+int(t.Lo))
		return min(int(t.OtherHi), key+int(t.Hi)+1) - first
	}
	lo, hi := int(t.OwnLo), int(t.OwnHi)-1
	return lo+int(t.Hi)+1 >= int(t.OtherHi) && 2*queries(hi) < queries(lo)
}

// fold returns the number of blocks that run from the shortest to the longest before the same number runs from the
// longest to the shortest, and the number of concurrent heads. All of them must run at once, and fill the SMs well.
func fold(blocks, heads, sms int) (fold, beside int) {
	const tries = 16
	pairs := (blocks + 1) / 2
	least := (pairs + sms - 1) / sms // parts of a head
	best := 0
	for parts := least; parts < least+tries; parts++ {
		n := (pairs + parts - 1) / parts
		concurrent := min(heads, sms/n)
		if rounds := parts * ((heads + concurrent - 1) / concurrent); best == 0 || rounds < best {
			best, fold, beside = rounds, n, concurrent
		}
	}
	return fold, beside
}

// HopperWaits splits gates: the kernels for Hopper wait for the first ones, and the stream must wait for the others
// before the launch.
func HopperWaits(all []attention.Gate) (within, before []attention.Gate) {
	var seen []tensor.Gate
	for _, g := range all {
		switch {
		case slices.Contains(seen, g.Gate):
			within = append(within, g)
		case len(seen) < source.HopperGates:
			seen = append(seen, g.Gate)
			within = append(within, g)
		default:
			before = append(before, g)
		}
	}
	return within, before
}

// gates returns a call's gates for a kernel, and the needs of its blocks, of rows own rows each: bit i of a block's
// word is gate i. Without gates, both are nil. reads returns the keys of a tile that a block reads.
func (f *Flash) gates(own []source.FlashTile, blocks, rows int,
	reads func(t source.FlashTile, lo, hi int) partition.Range) (needs []uint32, list []source.HopperGate) {
	if len(f.Gates) == 0 {
		return nil, nil
	}
	var seen []tensor.Gate
	numbers := make([]int, len(f.Gates))
	for i, g := range f.Gates {
		if numbers[i] = slices.Index(seen, g.Gate); numbers[i] < 0 {
			numbers[i], seen = len(seen), append(seen, g.Gate)
			list = append(list, source.HopperGate{At: halves(g.Word), Count: halves(g.Count)})
		}
	}
	needs = make([]uint32, blocks)
	for _, t := range own {
		eachBlock(t, blocks, rows, func(b, lo, hi int) {
			keys := reads(t, lo, hi)
			for i, g := range f.Gates {
				if max(keys.Lo, g.Rows.Lo) < min(keys.Hi, g.Rows.Hi) {
					needs[b] |= 1 << numbers[i]
				}
			}
		})
	}
	return needs, list
}

func halves(x uint64) [2]uint32 { return [2]uint32{uint32(x), uint32(x >> 32)} }

// lateLast moves the blocks that need a gate after the others and returns the number of the others. It keeps the order
// within both.
func lateLast(order []int32, needs []uint32) (early int) {
	late := func(b int32) int { return min(int(needs[b]), 1) }
	slices.SortStableFunc(order, func(a, b int32) int { return late(a) - late(b) })
	for early < len(order) && late(order[early]) == 0 {
		early++
	}
	return early
}

// stepsOf returns the number of steps, of step other rows, of each block of own rows.
func stepsOf(tiles []source.FlashTile, blocks, rows, step int) []int {
	steps := make([]int, blocks)
	for _, t := range tiles {
		eachBlock(t, blocks, rows, func(b, lo, hi int) {
			steps[b] += others(t, lo, hi, step).Len() / step
		})
	}
	return steps
}

// eachBlock calls f with each block, of rows own rows, that a tile overlaps, and the tile's rows in it.
func eachBlock(t source.FlashTile, blocks, rows int, f func(b, lo, hi int)) {
	for b := int(t.OwnLo) / rows; b < min(blocks, (int(t.OwnHi)+rows-1)/rows); b++ {
		f(b, max(b*rows, int(t.OwnLo)), min((b+1)*rows, int(t.OwnHi)))
	}
}

// others returns the other rows that own rows lo to hi of a tile visit, in whole steps. The last step may end after the
// tile.
func others(t source.FlashTile, lo, hi, step int) partition.Range {
	from, to := max(int(t.OtherLo), lo+int(t.Lo)), min(int(t.OtherHi), hi+int(t.Hi))
	return partition.Range{Lo: from, Hi: from + max(0, to-from+step-1)/step*step}
}

// allBlocks returns the numbers of blocks, ascending or, with down, descending.
func allBlocks(blocks int, down bool) []int32 {
	order := make([]int32, blocks)
	for i := range order {
		order[i] = int32(i)
	}
	if down {
		slices.Reverse(order)
	}
	return order
}

// longestFirst returns the blocks in descending order of their steps, or nil if that is the order of allBlocks.
func longestFirst(steps []int, down bool) []int32 {
	order := allBlocks(len(steps), down)
	longer := func(a, b int32) int { return steps[b] - steps[a] }
	if slices.IsSortedFunc(order, longer) {
		return nil
	}
	slices.SortStableFunc(order, longer)
	return order
}

// shortLast returns the number of a head's shortest blocks that run after the other blocks of all heads, so that SMs
// finish at the same time. They keep every SM busy for the steps of the longest block, or for one and a half
// times the steps of the shortest other block, near the end of the others. None has more than most steps.
func shortLast(steps []int, heads, sms, most int) (count int) {
	work, longest := 0, slices.Max(steps)
	for _, n := range slices.Sorted(slices.Values(steps)) {
		if 2*work >= sms*min(2*longest, 3*n) && n > 0 || n > most {
			break
		}
		if n > 0 {
			work += heads * n
			count++
		}
	}
	return count
}

// working returns the number of blocks that take a step.
func working(steps []int) (count int) {
	for _, n := range steps {
		if n > 0 {
			count++
		}
	}
	return count
}
