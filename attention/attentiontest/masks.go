package attentiontest

import (
	"fmt"
	"math/rand/v2"

	"github.com/cprun/cprun/partition"
)

// Definition is a mask by its meaning, pair by pair, to test the masks of package partition: documents, each with a
// diagonal of its own; or slices, in place of both.
type Definition struct {
	SeqQ, SeqKV  int
	Diagonal     partition.Diagonal
	Docs, DocsKV []int // no DocsKV: the same as Docs
	Slices       []partition.Slice
}

// Mask returns the mask that package partition makes of it.
func (d Definition) Mask() (partition.Mask, error) {
	if d.Slices != nil {
		return partition.SliceMaskOf(d.SeqQ, d.SeqKV, d.Slices)
	}
	return d.Diagonal.Mask(d.SeqQ, d.SeqKV, d.Docs, d.DocsKV)
}

// Sees reports whether query i sees key j.
func (d Definition) Sees(i, j int) bool {
	if d.Slices != nil {
		for _, s := range d.Slices {
			if sliceSees(s, i, j) {
				return true
			}
		}
		return false
	}
	docs, docsKV := d.documents()
	q, k := i, j
	for n := range docs {
		if q < docs[n] && k < docsKV[n] && q >= 0 && k >= 0 {
			return d.diagonalSees(d.Aligned(i), j)
		}
		q, k = q-docs[n], k-docsKV[n]
	}
	return false
}

func (d Definition) documents() (docs, docsKV []int) {
	docs, docsKV = d.Docs, d.DocsKV
	if docs == nil {
		docs, docsKV = []int{d.SeqQ}, []int{d.SeqKV}
	}
	if docsKV == nil {
		docsKV = docs
	}
	return docs, docsKV
}

// Aligned returns the key that query i is aligned with in its document. Slices have no alignment: the sequence is then
// one document, aligned at the bottom right.
func (d Definition) Aligned(i int) int {
	if d.Slices != nil {
		return i + d.SeqKV - d.SeqQ
	}
	docs, docsKV := d.documents()
	q, k := 0, 0 // the document's start
	for n := range docs {
		if i < q+docs[n] {
			if d.Diagonal.TopLeft {
				return k + i - q
			}
			return k + docsKV[n] - (q + docs[n] - i)
		}
		q, k = q+docs[n], k+docsKV[n]
	}
	panic("attentiontest: a query beyond all documents")
}

// diagonalSees reports whether a query aligned with a key sees another key of its document.
func (d Definition) diagonalSees(at, j int) bool {
	switch {
	case d.Diagonal.Causal && j > at:
		return false
	case d.Diagonal.Left >= 0 && at-j > d.Diagonal.Left:
		return false
	case d.Diagonal.Right >= 0 && j-at > d.Diagonal.Right:
		return false
	}
	return true
}

func sliceSees(s partition.Slice, i, j int) bool {
	if i < s.Q.Lo || i >= s.Q.Hi || j < s.K.Lo || j >= s.K.Hi {
		return false
	}
	i, j = i-s.Q.Lo, j-s.K.Lo
	fromEnd := s.K.Len() - s.Q.Len()
	switch s.Mask {
	case partition.SliceCausal:
		return j <= i+fromEnd
	case partition.SliceInvCausal:
		return j >= i
	case partition.SliceBiCausal:
		return j >= i && j <= i+fromEnd
	}
	return true
}

// Rows returns the mask that the definition gives pair by pair: a slice for each run of keys that a
// query sees.
func (d Definition) Rows() partition.Mask {
	m := partition.Mask{Band: partition.Band{Lo: 1, Hi: 0}} // hides everything
	for i := range d.SeqQ {
		for j := 0; j < d.SeqKV; j++ {
			lo := j
			for j < d.SeqKV && d.Sees(i, j) {
				j++
			}
			if lo < j {
				m.Slices = append(m.Slices, tile(i, i+1, lo, j, partition.Full()))
			}
		}
	}
	return m
}

// maskCases lists masks of slices, which overlap, and of documents with lengths in keys of their own: whole, and a
// hop of them.
func maskCases() []Case {
	r := func(lo, hi int) partition.Range { return partition.Range{Lo: lo, Hi: hi} }
	slices := Definition{SeqQ: 150, SeqKV: 190, Slices: []partition.Slice{
		{Q: r(0, 150), K: r(0, 40)}, {Q: r(20, 110), K: r(30, 150), Mask: partition.SliceCausal},
		{Q: r(70, 150), K: r(100, 190), Mask: partition.SliceBiCausal},
		{Q: r(0, 60), K: r(90, 190), Mask: partition.SliceInvCausal},
	}}
	docs := Definition{
		SeqQ: 150, SeqKV: 190, Diagonal: partition.Diagonal{Causal: true, Left: 50, Right: -1},
		Docs: []int{1, 60, 0, 59, 30}, DocsKV: []int{40, 90, 7, 0, 53},
	}
	var cs []Case
	for i, d := range []Definition{slices, docs} {
		name := []string{"slices that overlap", "documents with lengths in keys of their own"}[i]
		mask, err := d.Mask()
		if err != nil {
			panic(err)
		}
		for _, size := range []int{1, 3} {
			c, l := base(fmt.Sprintf("%s, %d ranks", name, size)), partition.Zigzag{}
			s := partition.Shape{SeqQ: d.SeqQ, SeqKV: d.SeqKV, Size: size, Layout: l, Mask: mask}
			c.Tiles = partition.Plan(s, size/2, 0)
			c.SeqQ, c.SeqK = partition.Count(l.Spans(d.SeqQ, size, size/2)), partition.Count(l.Spans(d.SeqKV, size, 0))
			cs = append(cs, c)
		}
	}
	return cs
}

// RandomDefinition returns a mask over at most that many queries and keys: any seed is a valid one.
func RandomDefinition(seed uint64, most int) Definition {
	rng := rand.New(rand.NewPCG(seed, 23))
	d := Definition{SeqQ: 1 + rng.IntN(most), SeqKV: 1 + rng.IntN(most)}
	bound := func() int { return rng.IntN(most/2+2) - 1 } // -1: all
	d.Diagonal = partition.Diagonal{Causal: rng.IntN(2) == 0, TopLeft: rng.IntN(3) == 0, Left: -1, Right: -1}
	if rng.IntN(2) == 0 {
		d.Diagonal.Left, d.Diagonal.Right = bound(), bound()
	}
	switch rng.IntN(4) {
	case 0:
		n := 1 + rng.IntN(7)
		d.Docs, d.DocsKV = lengths(rng, d.SeqQ, n), lengths(rng, d.SeqKV, n)
	case 1:
		d.SeqKV = d.SeqQ
		d.Docs = lengths(rng, d.SeqQ, 1+rng.IntN(7))
	case 2:
		d.Slices = randomSlices(rng, d.SeqQ, d.SeqKV)
	}
	return d
}

// lengths cuts a length into n parts, some of them 0.
func lengths(rng *rand.Rand, length, n int) []int {
	out := make([]int, n)
	for i := range out[1:] {
		if rng.IntN(3) > 0 {
			out[i] = rng.IntN(length + 1)
		}
		length -= out[i]
	}
	out[n-1] = length
	rng.Shuffle(n, func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func randomSlices(rng *rand.Rand, seqQ, seqKV int) []partition.Slice {
	within := func(n int) partition.Range {
		a, b := rng.IntN(n+1), rng.IntN(n+1)
		return partition.Range{Lo: min(a, b), Hi: max(a, b)}
	}
	out := []partition.Slice{}
	for range rng.IntN(9) {
		out = append(out, partition.Slice{Q: within(seqQ), K: within(seqKV), Mask: partition.SliceMask(rng.IntN(4))})
	}
	return out
}
