package partition

import "math"

// Inner returns the default number of ranks that exchange heads under hierarchical: neighbours of one host, so that the
// exchange stays inside it. It is the largest divisor of ranks and of perHost that divides the key heads, so that none
// is copied. If only 1 does, it is the largest that divides the query heads, and then the largest that gives each rank
// a head.
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

// Heads returns the query heads that member i of a group of size ranks computes. If they do not divide, some members
// have one more than others; with more members than heads, some have none.
func Heads(heads, size, i int) Range {
	return Range{Lo: i * heads / size, Hi: (i + 1) * heads / size}
}

// KeyHeads returns the key heads of those query heads, in an order for a kernel: each serves the same number of query
// heads. If the share does not begin and end with a key head, some come several times.
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

// WorkOfHeads returns the work of each rank if groups of inner neighbours exchange heads, given the work of each rank's
// rows by Work: the pairs of its group times its number of heads, at most the largest int.
func WorkOfHeads(work []int, inner, heads int) []int {
	out := make([]int, len(work))
	for r := range work {
		group, first := 0, r/inner*inner
		for _, w := range work[first : first+inner] {
			group += min(w, math.MaxInt-group)
		}
		out[r] = product(group, Heads(heads, inner, r-first).Len()).int()
	}
	return out
}
