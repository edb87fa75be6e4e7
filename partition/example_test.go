package partition_test

import (
	"fmt"

	"github.com/cprun/cprun/partition"
)

// A zigzag layout cuts the sequence into twice as many chunks as there are ranks and gives each rank
// one from the front and one from the back, so that all see equally many keys under a causal mask.
func Example() {
	s := partition.Shape{SeqQ: 16, SeqKV: 16, Size: 2, Layout: partition.Zigzag{},
		Mask: partition.Mask{Band: partition.Causal()}}
	for rank := range s.Size {
		fmt.Printf("rank %d has %v\n", rank, partition.Positions(s.Layout.Spans(s.SeqQ, s.Size, rank)))
		for owner := range s.Size {
			for _, t := range partition.Plan(s, rank, owner) {
				fmt.Printf("  queries %v see keys %v of rank %d: %d pairs\n", t.Q, t.K, owner, t.Pairs())
			}
		}
	}
	fmt.Printf("balance %.2f\n", partition.Balance(partition.Work(s)))
	// Output:
	// rank 0 has [0 1 2 3 12 13 14 15]
	//   queries {0 8} see keys {0 8} of rank 0: 36 pairs
	//   queries {4 8} see keys {0 8} of rank 1: 32 pairs
	// rank 1 has [4 5 6 7 8 9 10 11]
	//   queries {0 8} see keys {0 4} of rank 0: 32 pairs
	//   queries {0 8} see keys {0 8} of rank 1: 36 pairs
	// balance 1.00
}

// An index returns the tiles of any two ranks.
func ExampleNewIndex() {
	const n, ranks = 16, 2
	layout := partition.LayoutName("zigzag").Layout(nil)
	mask, err := partition.NewMask(true, -1, n, n, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	index := partition.NewIndex(partition.Shape{SeqQ: n, SeqKV: n, Size: ranks, Layout: layout, Mask: mask})
	for _, t := range index.Tiles(1, 0) {
		fmt.Println(t.Q, t.K, t.Pairs())
	}
	// Output:
	// {0 8} {0 4} 32
}

// Contiguous parts are the plainest layout, and the last rank then works nearly twice the mean.
func ExampleBalance() {
	for _, l := range []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{}} {
		s := partition.Shape{SeqQ: 1024, SeqKV: 1024, Size: 8, Layout: l,
			Mask: partition.Mask{Band: partition.Causal()}}
		fmt.Printf("%-10s %.2f\n", l.Name(), partition.Balance(partition.Work(s)))
	}
	// Output:
	// contiguous 0.53
	// zigzag     1.00
	// striped    0.99
}

// Slices describe masks that no band does: two tokens visible to all, two more that see each other, and two of causal
// text. A pair in several slices counts once.
func ExampleSliceMaskOf() {
	span := func(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	mask, err := partition.SliceMaskOf(6, 6, []partition.Slice{
		{Q: span(0, 6), K: span(0, 2)},
		{Q: span(2, 4), K: span(2, 4)},
		{Q: span(4, 6), K: span(0, 6), Mask: partition.SliceCausal},
	})
	fmt.Println(err)
	for _, t := range mask.Slices {
		fmt.Printf("queries %v, keys %v: %d pairs\n", t.Q, t.K, t.Pairs())
	}
	// Output:
	// <nil>
	// queries {0 6}, keys {0 2}: 12 pairs
	// queries {2 4}, keys {2 4}: 4 pairs
	// queries {4 6}, keys {2 6}: 7 pairs
}
