package partition

import (
	"reflect"
	"testing"
)

// Groups are inside a host, and copy no heads of keys where that can be.
func TestInner(t *testing.T) {
	for _, c := range []struct{ ranks, perHost, heads, kv, want int }{
		{8, 8, 32, 8, 8}, {16, 8, 32, 8, 8}, {8, 8, 32, 4, 4}, {16, 4, 32, 8, 4}, {6, 6, 12, 4, 2}, {8, 8, 8, 1, 8},
		{4, 4, 3, 1, 2}, {6, 6, 9, 1, 3}, {1, 1, 4, 2, 1}, {7, 7, 4, 4, 1}, {8, 1, 32, 8, 1}, {2, 8, 32, 8, 2},
	} {
		if got := Inner(c.ranks, c.perHost, c.heads, c.kv); got != c.want {
			t.Errorf("Inner(%d ranks, %d on a host, %d heads, %d of keys) = %d, want %d", c.ranks, c.perHost, c.heads, c.kv, got, c.want)
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
