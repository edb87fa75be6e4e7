// Package partition assigns the positions of a sequence to ranks (a Layout), and computes the rectangles of queries and
// keys, Tiles, that a rank computes against another rank's keys. It is integers only: no tensors, no devices, no
// goroutines, and it imports nothing of this module.
//
//	layout := partition.LayoutName("zigzag").Layout(nil)
//	mask, err := partition.NewMask(true, -1, n, n, nil)
//	index := partition.NewIndex(partition.Shape{SeqQ: n, SeqKV: n, Size: ranks, Layout: layout, Mask: mask})
//	tiles := index.Tiles(rank, owner)
package partition

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// Span is the global positions Start, Start+Stride, ..., Len of them.
type Span struct{ Start, Len, Stride int }

func (s Span) end() int { return s.Start + (s.Len-1)*s.Stride + 1 }

// A Layout gives every position of a sequence to exactly one rank.
type Layout interface {
	// Name is the value in the config: an entry of Names.
	Name() string
	// Spans lists the positions of one rank in the order in which it stores them: any
	// order, though neighbours that ascend make fewer tiles. No span is empty; a rank
	// without positions has no spans. All spans longer than one position have the same
	// stride, on every rank. A layout is a value: equal ones answer alike.
	Spans(seqLen, size, rank int) []Span
}

// Contiguous gives rank r the r-th of size equal parts. It is the plainest layout and, under
// a causal mask, an unbalanced one: the last rank works nearly twice the mean.
type Contiguous struct{}

// Name returns "contiguous".
func (Contiguous) Name() string { return "contiguous" }

// Spans returns one span, of seqLen/size positions rounded up or down.
func (Contiguous) Spans(seqLen, size, rank int) []Span {
	return chunks(nil, 0, seqLen, size, rank)
}

// Zigzag cuts the sequence into 2*size chunks and gives rank r chunks r and 2*size-1-r, so
// that causal work is the same on every rank (Megatron-LM context parallelism; Brandon et
// al., Striped Attention, arXiv:2311.09431, discuss the imbalance that it cures).
type Zigzag struct{}

// Name returns "zigzag".
func (Zigzag) Name() string { return "zigzag" }

// Spans returns two spans, fewer if the sequence is shorter than 2*size.
func (Zigzag) Spans(seqLen, size, rank int) []Span {
	s := chunks(nil, 0, seqLen, 2*size, rank)
	return chunks(s, 0, seqLen, 2*size, 2*size-1-rank)
}

// Window lays the first Rows positions out like Zigzag, and the others like Contiguous. It balances a causal mask with
// a sliding window of Rows keys, in which only the first Rows queries see fewer keys than others. Without room for both
// it equals Zigzag.
type Window struct{ Rows int }

// Name returns "window".
func (Window) Name() string { return "window" }

// Spans returns up to three spans, the contiguous one last.
func (w Window) Spans(seqLen, size, rank int) []Span {
	part := ceilDiv(w.Rows, 2*size)
	if part > seqLen/(2*size) {
		return Zigzag{}.Spans(seqLen, size, rank)
	}
	first := 2 * size * part
	return chunks(Zigzag{}.Spans(first, size, rank), first, seqLen-first, size, rank)
}

// Striped gives rank r the positions r, r+size, r+2*size, ... (Striped Attention,
// arXiv:2311.09431). Balance is near 1 for sequences much longer than size.
type Striped struct{}

// Name returns "striped".
func (Striped) Name() string { return "striped" }

// Spans returns one span of stride size.
func (Striped) Spans(seqLen, size, rank int) []Span {
	if rank >= seqLen {
		return nil
	}
	return []Span{{Start: rank, Len: (seqLen - rank + size - 1) / size, Stride: size}}
}

// DocumentZigzag is zigzag inside each document, so that each document of any length is balanced by itself
// (TransformerEngine and Megatron-LM lay packed documents out like this). It cuts also short documents in 2*size parts,
// whose keys all travel; Document does not. Docs are their lengths in tokens, which sum to the sequence length.
type DocumentZigzag struct{ Docs []int }

// Name returns "document-zigzag".
func (DocumentZigzag) Name() string { return "document-zigzag" }

// Spans returns up to two spans a document. The chunks of successive documents begin at
// successive ranks, so that the odd tokens of short documents do not pile up on one rank.
func (d DocumentZigzag) Spans(seqLen, size, rank int) []Span {
	if err := fits(d.Docs, seqLen); err != nil {
		panic("partition: " + err.Error())
	}
	var s []Span
	start := 0
	for i, n := range d.Docs {
		r := (rank + i) % size
		s = chunks(s, start, n, 2*size, r)
		s = chunks(s, start, n, 2*size, 2*size-1-r)
		start += n
	}
	return s
}

// chunks appends the c-th of n near-equal parts of [start, start+length), joined to the
// last span if it continues it.
func chunks(s []Span, start, length, n, c int) []Span {
	lo, hi := share(length, c, n), share(length, c+1, n)
	if lo == hi {
		return s
	}
	if k := len(s) - 1; k >= 0 && s[k].Start+s[k].Len == start+lo {
		s[k].Len += hi - lo
		return s
	}
	return append(s, Span{Start: start + lo, Len: hi - lo, Stride: 1})
}

// share returns c*length/n for c up to n, also if the product is more than an int holds.
func share(length, c, n int) int {
	hi, lo := bits.Mul64(uint64(length), uint64(c))
	if hi == 0 {
		return int(lo / uint64(n))
	}
	q, _ := bits.Div64(hi, lo, uint64(n))
	return int(q)
}

// A LayoutName selects a layout in a config or by a flag. In a config that is not resolved it may also be "auto".
type LayoutName string

// Names lists the layouts.
var Names = []string{"contiguous", "zigzag", "window", "striped", "document", "document-zigzag"}

// Check returns an error that lists the layouts unless n is one of Names.
func (n LayoutName) Check() error {
	if slices.Contains(Names, string(n)) {
		return nil
	}
	return fmt.Errorf("layout %q is none of %s", string(n), strings.Join(Names, ", "))
}

// ByDocument reports whether the layout follows from the lengths of documents.
func (n LayoutName) ByDocument() bool { return n == "document" || n == "document-zigzag" }

// Layout returns the layout of a name that Check accepts. Only layouts of documents use docs, the lengths in tokens.
// "document" and "window" use bands: the masks of a model's layers, each once; none: a causal mask.
func (n LayoutName) Layout(docs []int, bands ...Band) Layout {
	switch n {
	case "contiguous":
		return Contiguous{}
	case "zigzag":
		return Zigzag{}
	case "window":
		if len(bands) == 0 {
			return Window{Rows: 1 - Causal().Lo}
		}
		longest := slices.MinFunc(bands, func(a, b Band) int { return cmp.Compare(a.Lo, b.Lo) })
		return Window{Rows: max(0, 1-longest.Lo)}
	case "striped":
		return Striped{}
	case "document":
		return Document{Docs: docs, Bands: bands}
	case "document-zigzag":
		return DocumentZigzag{Docs: docs}
	}
	panic("partition: " + n.Check().Error())
}

// Count returns the number of positions in spans: the local sequence length.
func Count(spans []Span) int {
	n := 0
	for _, s := range spans {
		n += s.Len
	}
	return n
}

// Positions lists the global position of every local index.
func Positions(spans []Span) []int {
	p := make([]int, 0, Count(spans))
	for _, s := range spans {
		for i := range s.Len {
			p = append(p, s.Start+i*s.Stride)
		}
	}
	return p
}

// fits returns an error unless documents of these lengths fill a sequence. Lengths come from files: it subtracts them,
// since their sum may overflow an int.
func fits(docs []int, seqLen int) error {
	left := seqLen
	for i, n := range docs {
		if n < 0 {
			return fmt.Errorf("document %d has %d tokens", i, n)
		}
		if n > left {
			return fmt.Errorf("documents exceed the sequence of %d tokens: document %d has %d, with room for %d", seqLen,
				i, n, left)
		}
		left -= n
	}
	if left > 0 {
		return fmt.Errorf("documents hold %d tokens, the sequence %d", seqLen-left, seqLen)
	}
	return nil
}

// floorDiv rounds towards minus infinity; b > 0. Most strides are 1, and a division is slow.
func floorDiv(a, b int) int {
	if b == 1 {
		return a
	}
	q := a / b
	if q*b > a {
		q--
	}
	return q
}

func ceilDiv(a, b int) int { return -floorDiv(-a, b) }
