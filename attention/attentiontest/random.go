package attentiontest

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
)

// RandomCase returns one hop of a random layout under a random mask: any seed is a valid case.
func RandomCase(seed uint64) Case {
	rng := rand.New(rand.NewPCG(seed, 7))
	seq, size := 1+rng.IntN(400), 1+rng.IntN(4)
	docs := []int{}
	for left := seq; left > 0; {
		n := 1 + rng.IntN(left)
		docs = append(docs, n)
		left -= n
	}
	layout := []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{},
		partition.Document{Docs: docs}, partition.DocumentZigzag{Docs: docs}}[rng.IntN(5)]
	mask := partition.Mask{Band: partition.Full()}
	if rng.IntN(3) > 0 {
		mask.Hi = rng.IntN(21) - 10
	}
	if rng.IntN(3) == 0 {
		mask.Lo = min(mask.Hi, 0) - rng.IntN(seq)
	}
	if rng.IntN(2) == 0 {
		mask.Docs = docs
	}
	rank, owner, group := rng.IntN(size), rng.IntN(size), 1+rng.IntN(5)
	c := Case{
		Name: fmt.Sprintf("seed %d", seed), Batch: 1 + rng.IntN(2), KVHeads: 1 + rng.IntN(2),
		Dim: 1 + rng.IntN(24), DimV: 1 + rng.IntN(24), Layout: Layout(rng.IntN(4)),
		Spread: math.Exp(2 * rng.NormFloat64()), Calls: 1 + rng.IntN(3), Reversed: rng.IntN(2) == 0,
		Started: rng.IntN(2) == 0, Folded: rng.IntN(2) == 0,
		SeqQ: partition.Count(layout.Spans(seq, size, rank)),
		SeqK: partition.Count(layout.Spans(seq, size, owner)),
		Tiles: partition.Plan(partition.Shape{SeqQ: seq, SeqKV: seq, Size: size, Layout: layout, Mask: mask}, rank,
			owner),
	}
	c.PartFresh = c.Started && rng.IntN(2) == 0
	c.Heads = group * c.KVHeads
	c.Softmax = attention.Softmax{Scale: 1 / math.Sqrt(float64(c.Dim))}
	if rng.IntN(3) == 0 {
		c.Softmax.Softcap = 1 + 40*rng.Float64()
	}
	return c
}
