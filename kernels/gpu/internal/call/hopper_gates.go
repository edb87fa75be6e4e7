package call

import (
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

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

// gates are a call's as a kernel has them, and what blocks of so many own rows need of them: bit i of a block's word
// stands for gate i. nil where there are none. reads returns the keys that a block reads of a tile.
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

// halves returns the lower and the upper half of a word.
func halves(x uint64) [2]uint32 { return [2]uint32{uint32(x), uint32(x >> 32)} }

// lateLast moves the blocks that need a gate behind the others, which keep their order, and returns how many need none.
func lateLast(order []int32, needs []uint32) (early int) {
	late := func(b int32) int { return min(int(needs[b]), 1) }
	slices.SortStableFunc(order, func(a, b int32) int { return late(a) - late(b) })
	for early < len(order) && late(order[early]) == 0 {
		early++
	}
	return early
}
