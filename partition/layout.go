// Package partition says which rank holds which positions of a sequence, and which
// rectangles of queries and keys a rank must compute against another rank's keys. It is
// integers only: no tensors, no devices, no goroutines, no imports of ours.
package partition

import (
	"fmt"
	"sort"
)

// Span is the global positions Start, Start+Stride, ..., Len of them.
type Span struct{ Start, Len, Stride int }

// end is one past the last position.
func (s Span) end() int { return s.Start + (s.Len-1)*s.Stride + 1 }

// A Layout gives every position of a sequence to exactly one rank.
type Layout interface {
	// Name is the value in the config: "contiguous", "zigzag", "striped", "document".
	Name() string
	// Spans lists the positions of one rank in the order in which it stores them, which
	// is ascending. No span is empty; a rank without positions has no spans. All spans
	// longer than one position have the same stride, on every rank.
	Spans(seqLen, size, rank int) []Span
}

// Contiguous gives rank r the r-th of size equal parts. It is the plainest layout and, under
// a causal mask, an unbalanced one: the last rank works nearly twice the mean.
type Contiguous struct{}

// Name is "contiguous".
func (Contiguous) Name() string { return "contiguous" }

// Spans is one span, of seqLen/size positions rounded up or down.
func (Contiguous) Spans(seqLen, size, rank int) []Span {
	return chunks(nil, 0, seqLen, size, rank)
}

// Zigzag cuts the sequence into 2*size chunks and gives rank r chunks r and 2*size-1-r, so
// that causal work is the same on every rank (Megatron-LM context parallelism; Brandon et
// al., Striped Attention, arXiv:2311.09431, discuss the imbalance that it cures).
type Zigzag struct{}

// Name is "zigzag".
func (Zigzag) Name() string { return "zigzag" }

// Spans is two spans, fewer where the sequence is shorter than 2*size.
func (Zigzag) Spans(seqLen, size, rank int) []Span {
	s := chunks(nil, 0, seqLen, 2*size, rank)
	return chunks(s, 0, seqLen, 2*size, 2*size-1-rank)
}

// Striped gives rank r the positions r, r+size, r+2*size, ... (Striped Attention,
// arXiv:2311.09431). Balance is near 1 for sequences much longer than size.
type Striped struct{}

// Name is "striped".
func (Striped) Name() string { return "striped" }

// Spans is one span of stride size.
func (Striped) Spans(seqLen, size, rank int) []Span {
	if rank >= seqLen {
		return nil
	}
	return []Span{{Start: rank, Len: (seqLen - rank + size - 1) / size, Stride: size}}
}

// Document is zigzag inside each document, so that documents of any length are balanced,
// each on its own. The lengths sum to the sequence length.
type Document struct{ Docs []int }

// Name is "document".
func (Document) Name() string { return "document" }

// Spans is up to two spans a document. The chunks of successive documents begin at
// successive ranks, so that the odd tokens of short documents do not pile up on one rank.
func (d Document) Spans(seqLen, size, rank int) []Span {
	if sum(d.Docs) != seqLen {
		panic(fmt.Sprintf("partition: documents of %d tokens in a sequence of %d", sum(d.Docs), seqLen))
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
// last span where it continues it.
func chunks(s []Span, start, length, n, c int) []Span {
	lo, hi := c*length/n, (c+1)*length/n
	if lo == hi {
		return s
	}
	if k := len(s) - 1; k >= 0 && s[k].Start+s[k].Len == start+lo {
		s[k].Len += hi - lo
		return s
	}
	return append(s, Span{Start: start + lo, Len: hi - lo, Stride: 1})
}

// New is the layout of that name. docs is used by "document" alone.
func New(name string, docs []int) (Layout, error) {
	switch name {
	case "contiguous":
		return Contiguous{}, nil
	case "zigzag":
		return Zigzag{}, nil
	case "striped":
		return Striped{}, nil
	case "document":
		return Document{Docs: docs}, nil
	}
	return nil, fmt.Errorf("layout %q is none of contiguous, zigzag, striped, document", name)
}

// Count is the number of positions in spans: the local sequence length.
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

// within is the part of span s inside [lo, hi), as a range of indices of s.
func (s Span) within(lo, hi int) Range {
	a := max(0, ceilDiv(lo-s.Start, s.Stride))
	b := min(s.Len, ceilDiv(hi-s.Start, s.Stride))
	return Range{a, max(a, b)}
}

// overlapping is the spans that have a position in [lo, hi), with the local index at which
// each begins. spans ascend; starts[i] is the local index of spans[i].
func overlapping(spans []Span, lo, hi int) (first, last int) {
	first = sort.Search(len(spans), func(i int) bool { return spans[i].end() > lo })
	last = first + sort.Search(len(spans)-first, func(i int) bool { return spans[first+i].Start >= hi })
	return first, last
}

func starts(spans []Span) []int {
	at, n := make([]int, len(spans)), 0
	for i, s := range spans {
		at[i] = n
		n += s.Len
	}
	return at
}

func sum(xs []int) int {
	n := 0
	for _, x := range xs {
		n += x
	}
	return n
}

// floorDiv rounds towards minus infinity; b > 0.
func floorDiv(a, b int) int {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

func ceilDiv(a, b int) int { return -floorDiv(-a, b) }
