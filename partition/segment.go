package partition

import (
	"fmt"
	"slices"
)

// Segment is consecutive rows of a rank that hold consecutive positions of one document: as many as there are.
type Segment struct {
	Doc, Rank int
	Rows      Range // of the rank
	Start     int   // the position of the first row in the sequence
	Place     int   // among the rank's segments, in the order of their rows
}

// Segments are all segments of a sequence. The segment before another of the same document holds the positions just
// before it, on any rank: layers with a recurrent state hand it on from one to the next.
type Segments struct {
	All  []Segment // in the order of the sequence
	Docs []Range   // of each document, its segments in All
	Own  [][]int   // of each rank, its segments in All, by Place
}

// NewSegments returns the segments of the queries of s, cut at the documents of its mask. Of the mask it needs only
// Docs. Layouts with a stride have no segments: an error lists the others.
func NewSegments(s Shape) (*Segments, error) {
	if len(s.Mask.Slices) > 0 {
		return nil, fmt.Errorf("a mask of %d slices has no order of segments; list documents in Mask.Docs",
			len(s.Mask.Slices))
	}
	spans := AllSpans(s.Layout, s.SeqQ, s.Size)
	for rank := range spans {
		if slices.ContainsFunc(spans[rank], func(x Span) bool { return x.Stride > 1 }) {
			others := slices.DeleteFunc(slices.Clone(Names), func(name string) bool { return name == s.Layout.Name() })
			return nil, fmt.Errorf("layout %s separates neighbouring positions, so that a recurrent state would travel"+
				" for each; use one of %v", s.Layout.Name(), others)
		}
	}
	byQ, _ := s.Mask.cuts()
	x := &Segments{Docs: make([]Range, max(1, len(s.Mask.Docs))), Own: make([][]int, s.Size)}
	for rank, pieces := range cutAll(spans, byQ) {
		for i := range pieces.list {
			p := &pieces.list[i]
			x.All = append(x.All, Segment{Doc: p.doc, Rank: rank, Rows: Range{p.at, p.at + p.Len}, Start: p.Start})
		}
	}
	slices.SortFunc(x.All, func(a, b Segment) int { return a.Start - b.Start })
	x.join()
	for i := range x.All {
		doc, own := &x.Docs[x.All[i].Doc], &x.Own[x.All[i].Rank]
		*doc, *own = doc.Hull(Range{i, i + 1}), append(*own, i)
	}
	for _, own := range x.Own {
		slices.SortFunc(own, func(a, b int) int { return x.All[a].Rows.Lo - x.All[b].Rows.Lo })
		for place, i := range own {
			x.All[i].Place = place
		}
	}
	return x, nil
}

// join joins neighbours in the sequence that are neighbours on one rank.
func (x *Segments) join() {
	all := x.All[:0]
	for _, s := range x.All {
		if n := len(all) - 1; n >= 0 && all[n].Doc == s.Doc && all[n].Rank == s.Rank && all[n].Rows.Hi == s.Rows.Lo {
			all[n].Rows.Hi = s.Rows.Hi
			continue
		}
		all = append(all, s)
	}
	x.All = all
}
