package partition_test

import (
	"testing"

	"github.com/cprun/cprun/partition"
)

// Halo counts the rows that each rank needs of others, and answers the same with and without Prepare.
func TestHalo(t *testing.T) {
	const n = 48
	found := map[bool]int{}
	for _, layout := range []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{}} {
		for ranks := 1; ranks <= 6; ranks++ {
			for _, behind := range []int{0, 1, 7, 8, 9, 16, 17, 24, n - 1} {
				for _, ahead := range []int{0, 3, 8, n - 1} {
					s := partition.Shape{SeqQ: n, SeqKV: n, Size: ranks, Layout: layout,
						Mask: partition.Mask{Band: partition.Band{Lo: -behind, Hi: ahead}}}
					x := partition.NewIndex(s)
					want := behind < n-1 && ahead < n-1
					block := 0
					for r := range ranks {
						block = max(block, x.Keys(r))
					}
					for r := range ranks {
						others := 0
						for owner := range ranks {
							if owner != r {
								others += x.Needs(r, owner).Len()
							}
						}
						want = want && others <= 2*block
					}
					plain := x.Halo()
					x.Prepare()
					if prepared := x.Halo(); plain != want || prepared != want {
						t.Errorf("%s over %d ranks, %d behind and %d ahead: %t, prepared %t, want %t", layout.Name(),
							ranks, behind, ahead, plain, prepared, want)
					}
					found[want]++
				}
			}
		}
	}
	if found[true] == 0 || found[false] == 0 {
		t.Errorf("cases by answer: %v", found)
	}
}

// Positions after the last document see nothing.
func TestAfterTheLastDocument(t *testing.T) {
	m := partition.Mask{Docs: []int{4, 3}, Band: partition.Band{Lo: -15, Hi: 0}}
	work := partition.Work(partition.Shape{SeqQ: 16, SeqKV: 16, Size: 2, Layout: partition.Contiguous{}, Mask: m})
	if work[0] != 4*5/2+3*4/2 || work[1] != 0 {
		t.Errorf("work %v, want 16 pairs of rank 0 and none of rank 1", work)
	}
}
