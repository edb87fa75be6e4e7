package partition

import (
	"slices"
	"sort"
)

// A cuts value lists where positions, of queries or of keys, are cut: at the ends of documents, or at the bounds
// of slices; neither: nowhere.
type cuts struct {
	ends   []int   // one past the last position of each document
	ranges []Range // of each slice
}

func (m *Mask) cuts() (q, k cuts) {
	for _, t := range m.Slices {
		q.ranges, k.ranges = append(q.ranges, t.Q), append(k.ranges, t.K)
	}
	if len(m.Slices) > 0 || len(m.Docs) == 0 {
		return q, k
	}
	ends, n := make([]int, len(m.Docs)), 0
	for i, d := range m.Docs {
		n += d
		ends[i] = n
	}
	return cuts{ends: ends}, cuts{ends: ends}
}

// bounds returns the positions of a document or slice, in a sequence of n.
func (c cuts) bounds(doc, n int) (lo, hi int) {
	switch {
	case len(c.ranges) > 0:
		return c.ranges[doc].Lo, c.ranges[doc].Hi
	case len(c.ends) == 0:
		return 0, n
	case doc > 0:
		lo = c.ends[doc-1]
	}
	return min(lo, n), min(c.ends[doc], n)
}

// cut cuts spans, in memory that may be nil. Where nothing is to be cut a span is one piece.
func (c cuts) cut(spans []Span, room []piece) pieces {
	if len(c.ranges) > 0 {
		return cutSlices(spans, c.ranges)
	}
	p := pieces{list: room, ascend: true}
	for _, s := range spans {
		p.add(s, c.ends)
	}
	byDoc := func(a, b piece) int { return a.doc - b.doc }
	if !slices.IsSortedFunc(p.list, byDoc) {
		slices.SortStableFunc(p.list, byDoc)
		p.ascend = false
	}
	return p
}

// cutSlices returns the pieces of each slice, one slice behind the other. Where spans ascend, a slice costs a
// search and the spans that it has positions of.
func cutSlices(spans []Span, ranges []Range) pieces {
	var p pieces
	at := make([]int, len(spans))
	inOrder := true
	for i, s := range spans {
		at[i] = p.rows
		p.rows += s.Len
		inOrder = inOrder && (i == 0 || spans[i-1].end() <= s.Start)
	}
	for doc, r := range ranges {
		i := 0
		if inOrder {
			i = sort.Search(len(spans), func(i int) bool { return spans[i].end() > r.Lo })
		}
		for ; i < len(spans) && (!inOrder || spans[i].Start < r.Hi); i++ {
			s := spans[i]
			lo := min(max(ceilDiv(r.Lo-s.Start, s.Stride), 0), s.Len)
			hi := min(max(ceilDiv(r.Hi-s.Start, s.Stride), 0), s.Len)
			if lo < hi {
				part := Span{Start: s.Start + lo*s.Stride, Len: hi - lo, Stride: s.Stride}
				p.list = append(p.list, piece{Span: part, at: at[i] + lo, doc: doc})
			}
		}
	}
	p.ascend = rises(p.list)
	return p
}

// rises reports whether every local index of a slice is above those of all slices before it.
func rises(list []piece) bool {
	before, top := 0, 0 // one past the highest index of earlier slices, and of all so far
	for i, p := range list {
		if i > 0 && p.doc != list[i-1].doc {
			before = top
		}
		if p.at < before {
			return false
		}
		top = max(top, p.at+p.Len)
	}
	return true
}
