package ring

import (
	"flag"
	"strings"
	"testing"

	"github.com/cprun/cprun/partition"
)

// Full has random tests try ten times as many cases, and TestRingEqualsOneDevice all that it takes a sample of:
// `make test-ring`, minutes.
var Full = flag.Bool("ring.full", false, "try ten times as many random cases, and all combinations: minutes")

// Draws returns the number of random cases, about n. Under -short, for `make race`, it is a third of them: the
// concurrency depends on the algorithm, not on the numbers.
func Draws(n int) int {
	switch {
	case *Full:
		return 10 * n
	case testing.Short():
		return n / 3
	}
	return n
}

// Variants lists the Algorithms, and variants that fetch rows in one hop before the first call.
var Variants = append([]string{"allgather before", "hierarchical before", "allgather auto"}, Algorithms...)

// Layouts returns the layouts of a sequence. If it has documents, they include the layouts of documents.
func Layouts(docs []int) []partition.Layout {
	all := []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{}, partition.Window{Rows: 9}}
	if docs != nil {
		all = append(all, partition.Document{Docs: docs}, partition.DocumentZigzag{Docs: docs})
	}
	return all
}

// As returns the algorithm of a variant, and its spec.
func As(variant string, s Spec) (string, Spec) {
	algorithm, gather, _ := strings.Cut(variant, " ")
	s.Gather = gather
	return algorithm, s
}

// Make returns what New does, and accepts variants.
func Make(variant string, s Spec, rank int) (*Schedule, error) {
	algorithm, s := As(variant, s)
	return New(algorithm, s, rank)
}
