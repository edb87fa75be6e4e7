package ring

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/partition"
)

// benchShape returns a causal sequence of 4,096 tokens a rank, cut into documents of uneven lengths; one document:
// without a mask of documents.
func benchShape(tb testing.TB, layout string, ranks, docs int) partition.Shape {
	tb.Helper()
	n := 4096 * ranks
	lengths := make([]int, docs)
	for i, left := 0, n; i < docs; i++ {
		lengths[i] = left / (docs - i)
		if i%2 == 0 && i+1 < docs {
			lengths[i] = lengths[i] * 2 / 3
		}
		left -= lengths[i]
	}
	l := partition.LayoutName(layout).Layout(lengths)
	if docs == 1 {
		lengths = nil
	}
	m := Must(partition.NewMask(true, -1, n, n, lengths))
	return partition.Shape{SeqQ: n, SeqKV: n, Size: ranks, Layout: l, Mask: m}
}

// The schedule of one rank, as a worker makes it for each shape of batch.
func BenchmarkNew(b *testing.B) {
	for _, layout := range partition.Names {
		for _, docs := range []int{1, 100, 1000} {
			for _, ranks := range []int{8, 64, 1024} {
				b.Run(fmt.Sprintf("%s/docs=%d/ranks=%d", layout, docs, ranks), func(b *testing.B) {
					shape := benchShape(b, layout, ranks, docs)
					for b.Loop() {
						if _, err := New("ring", specOf(shape), ranks/2); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// The schedules of all ranks, as a plan of a run makes them.
func BenchmarkAll(b *testing.B) {
	for _, algorithm := range Algorithms {
		for _, ranks := range []int{8, 64, 256, 1024} {
			b.Run(fmt.Sprintf("%s/ranks=%d", algorithm, ranks), func(b *testing.B) {
				shape := benchShape(b, "zigzag", ranks, 1)
				for b.Loop() {
					All(algorithm, specOf(shape))
				}
			})
		}
	}
}
