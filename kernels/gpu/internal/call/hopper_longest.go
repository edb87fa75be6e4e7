package call

import (
	"slices"

	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
)

// stepsOf returns how many steps, of so many other rows, each block of so many own rows takes.
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

// longestFirst returns the blocks, those that take the most steps first; nil where that is from the first to the last
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

// together returns how many of the blocks of a head, those that take the fewest steps but some, are taken after the
// others of all heads: as many as keep every SM at work for as long as the longest one takes, so that SMs come to their
// end together, but none that takes more than so many steps.
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
