package partition

import (
	"math"
	"math/bits"
)

// Inner returns how many ranks trade heads with each other under hierarchical, unless a config
// says it: neighbours of one host, so that the trade stays inside it. It is the largest divisor of
// ranks and of perHost that divides the heads of keys too, so that none is copied, and with groups of
// more than one rank: if there is none, the largest that divides the heads of queries, and then the
// largest that gives each rank a head.
func Inner(ranks, perHost, heads, kvHeads int) int {
	for _, fits := range []func(n int) bool{
		func(n int) bool { return kvHeads%n == 0 },
		func(n int) bool { return heads%n == 0 },
		func(n int) bool { return n <= heads },
	} {
		for n := min(ranks, perHost); n > 1; n-- {
			if ranks%n == 0 && perHost%n == 0 && fits(n) {
				return n
			}
		}
	}
	return 1
}

// Heads returns the heads of queries that member i of a group of size ranks computes. Where they do
// not divide, some members have one more than others; where there are fewer than members, some have
// none.
func Heads(heads, size, i int) Range {
	return Range{Lo: i * heads / size, Hi: (i + 1) * heads / size}
}

// KeyHeads returns the heads of keys that those heads of queries need, in an order in which a kernel
// finds them: each serves as many heads of queries as the next. Where the share does not begin and end
// with a head of keys, some come several times.
func KeyHeads(q Range, heads, kvHeads int) []int {
	for group := q.Len(); group > 0; group-- {
		if q.Len()%group != 0 {
			continue
		}
		var list []int
		for h := q.Lo; h < q.Hi; h += group {
			first, last := h*kvHeads/heads, (h+group-1)*kvHeads/heads
			if first != last {
				list = nil
				break
			}
			list = append(list, first)
		}
		if list != nil {
			return list
		}
	}
	return nil
}

// WorkOfHeads returns the work of each rank where groups of inner neighbours trade heads, given the work of
// the rows that each holds, as Work counts it: the pairs of its group times the heads that it computes.
// A product too large for an int is the largest int.
func WorkOfHeads(work []int, inner, heads int) []int {
	out := make([]int, len(work))
	for r := range work {
		group, first := 0, r/inner*inner
		for _, w := range work[first : first+inner] {
			group += min(w, math.MaxInt-group)
		}
		hi, lo := bits.Mul64(uint64(group), uint64(Heads(heads, inner, r-first).Len()))
		if out[r] = int(min(lo, math.MaxInt)); hi > 0 {
			out[r] = math.MaxInt
		}
	}
	return out
}
