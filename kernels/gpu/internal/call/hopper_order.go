package call

import (
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// HopperOrdered returns HopperBackward where blocks of keys take turns to add to dQ, so that its bits are the same
// whenever as many SMs of a GPU compute it. It is for calls that HasOrder.
func (f *Flash) HopperOrdered(s source.HopperShape, sms SMs, fresh partition.Range) HopperBackward {
	l, steps := f.hopperBackward(s, true, fresh)
	if working(steps) == 0 {
		return l
	}
	o := f.orderOf(s, sms.Taken)
	l.Grid[0] = o.blocks * f.K.Len(tensor.Heads)
	l.Progress = l.Grid[0] * l.Grid[2] * s.KeyGroups
	p := &l.Params
	p.Start, p.Blocks, p.Fold, p.Beside = int32(o.start), int32(o.blocks), int32(o.fold), int32(o.beside)
	if o.banded {
		p.Banded = 1
	}
	l.share(sms)
	l.Next = l.Grid[2]
	p.Polls = turnPolls
	if f.Gates != nil {
		p.Polls = 0 // the one before may wait for rows of a peer, for which only the host's deadline is right
	}
	return l
}

// turnPolls limits the polls of a block of keys for its turn to about two minutes.
const turnPolls = 1 << 27

// HasOrder reports whether blocks of keys can add to dQ in order: each goes over the queries of a head from
// the last to the first, and once.
func (f *Flash) HasOrder(s source.HopperShape) bool {
	const most = 1 << 31 // rows that a block counts
	if f.Q.Len(tensor.Heads)/f.K.Len(tensor.Heads)*f.Q.Len(tensor.Seq) >= most {
		return false
	}
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

// An order is how blocks of keys take turns; see turn of hopper_backward.cuh.
type order struct {
	start, blocks int
	banded        bool
	fold, beside  int
}

// orderOf returns the order for a call's tiles.
func (f *Flash) orderOf(s source.HopperShape, sms int) order {
	own := ownTiles(f.Tiles, true)
	keys := s.OwnKeys()
	reach := int(own[len(own)-1].Reach)
	o := order{start: int(own[0].OwnLo) / keys, banded: len(own) == 1}
	o.blocks = (reach+keys-1)/keys - o.start
	if o.banded && shrinks(own[0]) {
		o.fold, o.beside = fold(o.blocks, f.K.Len(tensor.Heads), sms)
	}
	return o
}

// shrinks reports whether the first keys of a tile see its last query, as all do, and the last keys less than half as
// many.
func shrinks(t source.FlashTile) bool {
	queries := func(key int) int {
		first := max(int(t.OtherLo), key+int(t.Lo))
		return min(int(t.OtherHi), key+int(t.Hi)+1) - first
	}
	lo, hi := int(t.OwnLo), int(t.OwnHi)-1
	return lo+int(t.Hi)+1 >= int(t.OtherHi) && 2*queries(hi) < queries(lo)
}

// fold returns how many blocks come from the shortest to the longest before as many come the other way round, and how
// many heads go together, so that the first ones fill the SMs well, and all run at once.
func fold(blocks, heads, sms int) (fold, beside int) {
	const tries = 16
	pairs := (blocks + 1) / 2
	least := (pairs + sms - 1) / sms // parts of a head
	best := 0
	for parts := least; parts < least+tries; parts++ {
		n := (pairs + parts - 1) / parts
		together := min(heads, sms/n)
		if rounds := parts * ((heads + together - 1) / together); best == 0 || rounds < best {
			best, fold, beside = rounds, n, together
		}
	}
	return fold, beside
}

// HopperWaits returns the gates that the kernels for Hopper wait for, and those that are too many for them, which the
// stream is to wait for before.
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

// gates returns a call's gates for a kernel, and the needs of blocks of that many own rows: bit i of a block's word is
// gate i. nil without gates. reads returns the keys that a block reads of a tile.
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

// lateLast moves the blocks that need a gate after the others, which keep their order, and returns how many need none.
func lateLast(order []int32, needs []uint32) (early int) {
	late := func(b int32) int { return min(int(needs[b]), 1) }
	slices.SortStableFunc(order, func(a, b int32) int { return late(a) - late(b) })
	for early < len(order) && late(order[early]) == 0 {
		early++
	}
	return early
}

// stepsOf returns the steps, of that many other rows, that each block of own rows takes.
func stepsOf(tiles []source.FlashTile, blocks, rows, step int) []int {
	steps := make([]int, blocks)
	for _, t := range tiles {
		eachBlock(t, blocks, rows, func(b, lo, hi int) {
			steps[b] += others(t, lo, hi, step).Len() / step
		})
	}
	return steps
}

// eachBlock calls f with the blocks of so many own rows that a tile meets, and the rows of it that it has of each.
func eachBlock(t source.FlashTile, blocks, rows int, f func(b, lo, hi int)) {
	for b := int(t.OwnLo) / rows; b < min(blocks, (int(t.OwnHi)+rows-1)/rows); b++ {
		f(b, max(b*rows, int(t.OwnLo)), min((b+1)*rows, int(t.OwnHi)))
	}
}

// others returns the other rows that own rows lo to hi of a tile go over, in whole steps: the last may reach beyond the
// tile.
func others(t source.FlashTile, lo, hi, step int) partition.Range {
	from, to := max(int(t.OtherLo), lo+int(t.Lo)), min(int(t.OtherHi), hi+int(t.Hi))
	return partition.Range{Lo: from, Hi: from + max(0, to-from+step-1)/step*step}
}

// allBlocks returns so many blocks, from the first to the last or, down, the other way round.
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

// longestFirst returns the blocks, those that take the most steps first; nil if that is from the first to the last
// or, down, the other way round.
func longestFirst(steps []int, down bool) []int32 {
	order := allBlocks(len(steps), down)
	longer := func(a, b int32) int { return steps[b] - steps[a] }
	if slices.IsSortedFunc(order, longer) {
		return nil
	}
	slices.SortStableFunc(order, longer)
	return order
}

// together counts the blocks of a head, those with the fewest steps, that run after the others of all heads: enough to
// keep every SM busy for as long as the longest one runs, so that SMs finish together, but none with more than most
// steps.
func together(steps []int, heads, sms, most int) (count int) {
	work, enough := 0, sms*slices.Max(steps)
	for _, n := range slices.Sorted(slices.Values(steps)) {
		if work >= enough || n > most {
			break
		}
		if n > 0 {
			work += heads * n
			count++
		}
	}
	return count
}

// working returns how many blocks take a step.
func working(steps []int) (count int) {
	for _, n := range steps {
		if n > 0 {
			count++
		}
	}
	return count
}
