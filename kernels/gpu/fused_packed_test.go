//go:build cuda

package gpu

import (
	"fmt"
	"testing"
)

// TestFusedPackedVariants compares packed calls with calls of one piece each. The default packing must be correct. The
// test logs the errors of the others, since a version of cuDNN may support more or less than packing assumes.
func TestFusedPackedVariants(t *testing.T) {
	want := map[int]results{}
	at := func(dim int) fusedCase {
		c := fusedCases(t)["documents, 2 ranks"]
		c.dim = dim
		return c
	}
	dims := []int{64, 120, 128, 256}
	for _, dim := range dims {
		t.Run(fmt.Sprintf("head dim %d, one by one", dim), func(t *testing.T) {
			want[dim] = at(dim).whole().run(t, newFused(t, FusedOptions{}), nil)
		})
		t.Run(fmt.Sprintf("head dim %d", dim), func(t *testing.T) {
			at(dim).packed(t, defaultPacking).near(t, want[dim], 4)
		})
	}
	for _, dim := range dims { // last, since one of them may break the device
		for _, p := range packings(dim) {
			t.Run(fmt.Sprintf("head dim %d, %+v", dim, p), func(t *testing.T) {
				for name, d := range at(dim).packed(t, p).from(t, want[dim]) {
					t.Logf("%-3s off by %.3g of %.3g: %.2f roundings", name, d.Abs, d.Largest, 256*d.Relative())
				}
			})
		}
	}
}

// packed returns the results of packed calls with the given packing.
func (c fusedCase) packed(t *testing.T, p packing) results {
	t.Helper()
	r := newFused(t, FusedOptions{Packed: true})
	r.packing = p
	return c.run(t, r, nil)
}

// packings returns the variants of the default that change the call at dim.
func packings(dim int) []packing {
	var all []packing
	p := defaultPacking
	p.widest = max(p.widest, dim)
	for dim%p.multiple != 0 {
		p.multiple /= 2
	}
	for _, least := range []int{64, 128, 256} {
		for _, loose := range []bool{false, true} {
			p.least, p.loose = least, loose
			if p != defaultPacking {
				all = append(all, p)
			}
		}
	}
	return all
}
