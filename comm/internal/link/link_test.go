package link

import (
	"math/bits"
	"slices"
	"testing"
)

// TestNeighbours checks that whoever is a neighbour has this rank as one, once, that there are few, and
// that those at distances of powers of two are among them.
func TestNeighbours(t *testing.T) {
	for n := 1; n <= 70; n++ {
		of := make([][]int, n)
		for r := range n {
			Neighbours(r, n, func(peer int) { of[r] = append(of[r], peer) })
		}
		for r, near := range of {
			if sorted := slices.Compact(slices.Sorted(slices.Values(near))); len(sorted) != len(near) ||
				slices.Contains(near, r) {
				t.Fatalf("the neighbours of rank %d of %d are %v", r, n, near)
			}
			if most := 2 * bits.Len(uint(n-1)); len(near) > most {
				t.Errorf("rank %d of %d has %d neighbours, above %d", r, n, len(near), most)
			}
			for d := 1; d < n; d *= 2 {
				if !slices.Contains(near, (r+d)%n) || !slices.Contains(near, (r-d+n)%n) {
					t.Errorf("rank %d of %d has not both ranks at a distance of %d among %v", r, n, d, near)
				}
			}
			for _, p := range near {
				if !slices.Contains(of[p], r) {
					t.Errorf("rank %d of %d is no neighbour of its neighbour %d", r, n, p)
				}
			}
		}
	}
}
