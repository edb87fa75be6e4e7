package partition

import (
	"math"
	"reflect"
	"testing"
)

// Groups lie inside a host, and copy no key heads if possible.
func TestInner(t *testing.T) {
	for _, c := range []struct{ ranks, perHost, heads, kv, want int }{
		{8, 8, 32, 8, 8}, {16, 8, 32, 8, 8}, {8, 8, 32, 4, 4}, {16, 4, 32, 8, 4}, {6, 6, 12, 4, 2}, {8, 8, 8, 1, 8},
		{4, 4, 3, 1, 2}, {6, 6, 9, 1, 3}, {1, 1, 4, 2, 1}, {7, 7, 4, 4, 1}, {8, 1, 32, 8, 1}, {2, 8, 32, 8, 2},
		{12, 8, 24, 12, 4}, {6, 4, 8, 8, 2}, // divisors of one number alone: 6, 4
	} {
		if got := Inner(c.ranks, c.perHost, c.heads, c.kv); got != c.want {
			t.Errorf("Inner(%d ranks, %d on a host, %d heads, %d of keys) = %d, want %d", c.ranks, c.perHost, c.heads,
				c.kv, got, c.want)
		}
	}
}

// The order of heads of keys must be one in which each serves as many heads of queries.
func TestHeadsOfKeysServeAlike(t *testing.T) {
	for _, c := range []struct {
		lo, hi, heads, kv int
		want              []int
	}{
		{0, 4, 8, 2, []int{0}}, {2, 4, 8, 8, []int{2, 3}}, {0, 8, 8, 2, []int{0, 1}},
		{1, 3, 6, 3, []int{0, 1}}, {1, 4, 6, 3, []int{0, 1, 1}}, {3, 4, 6, 3, []int{1}}, {2, 2, 6, 3, nil},
	} {
		if got := KeyHeads(Range{Lo: c.lo, Hi: c.hi}, c.heads, c.kv); !reflect.DeepEqual(got, c.want) {
			t.Errorf("heads %d to %d of %d over %d: %v, want %v", c.lo, c.hi, c.heads, c.kv, got, c.want)
		}
	}
}

func TestWorkOfHeads(t *testing.T) {
	for _, c := range []struct {
		work         []int
		inner, heads int
		want         []int
	}{
		{[]int{1, 2, 3, 4}, 1, 8, []int{8, 16, 24, 32}},
		{[]int{1, 2, 3, 4}, 2, 8, []int{12, 12, 28, 28}},
		{[]int{1, 2, 3, 4}, 4, 6, []int{10, 20, 10, 20}},
		{[]int{1, 2, 3, 4}, 4, 3, []int{0, 10, 10, 10}},
		{[]int{math.MaxInt, 1}, 2, 4, []int{math.MaxInt, math.MaxInt}},
		// their sum would be 0
		{[]int{math.MaxInt, math.MaxInt, 2}, 3, 3, []int{math.MaxInt, math.MaxInt, math.MaxInt}},
	} {
		if got := WorkOfHeads(c.work, c.inner, c.heads); !reflect.DeepEqual(got, c.want) {
			t.Errorf("WorkOfHeads(%v, %d, %d) = %v, want %v", c.work, c.inner, c.heads, got, c.want)
		}
	}
}
