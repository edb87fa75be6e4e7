package ring

import (
	"sort"

	"github.com/cprun/cprun/partition"
)

// gathered gives a rank the positions of inner neighbouring ranks of another layout, in order. It joins neighbouring
// spans: a zigzag over 8 ranks, gathered in groups of 2, becomes a zigzag over 4.
type gathered struct {
	partition.Layout
	inner int
}

// A place locates a span of a member of the group: in the member's own rows, and in the gathered rows.
type place struct {
	member    int
	own, rows partition.Range
	span      partition.Span
}

func (g gathered) places(n, size, rank int) []place {
	var all []place
	for i := range g.inner {
		at := 0
		for _, s := range g.Layout.Spans(n, size*g.inner, rank*g.inner+i) {
			all = append(all, place{member: i, own: partition.Range{Lo: at, Hi: at + s.Len}, span: s})
			at += s.Len
		}
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].span.Start < all[j].span.Start })
	at := 0
	for i := range all {
		all[i].rows = partition.Range{Lo: at, Hi: at + all[i].span.Len}
		at += all[i].span.Len
	}
	return all
}

// Spans lists the positions of a group.
func (g gathered) Spans(n, size, rank int) []partition.Span {
	var spans []partition.Span
	for _, p := range g.places(n, size, rank) {
		k := len(spans) - 1
		if k >= 0 && spans[k].Stride == 1 && p.span.Stride == 1 && spans[k].Start+spans[k].Len == p.span.Start {
			spans[k].Len += p.span.Len
			continue
		}
		spans = append(spans, p.span)
	}
	return spans
}
