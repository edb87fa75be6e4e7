package ring

import (
	"slices"
	"sort"

	"github.com/cprun/cprun/partition"
)

// newExchange plans the exchanges of member i of a group. lists are the heads of each member, places the rows of each.
func newExchange(places []place, degree, group, i int, lists [][]int) *Exchange {
	x, known := &Exchange{Heads: len(lists[i])}, map[int]bool{}
	for to, list := range lists {
		for lo, hi := 0, 0; lo < len(list); lo = hi {
			adds := known[list[lo]] // a run of neighbouring heads that all go to a member before, or none
			for hi = lo; hi < len(list) && list[hi] == list[lo]+hi-lo && known[list[hi]] == adds; hi++ {
			}
			from, into := partition.Range{Lo: list[lo], Hi: list[lo] + hi - lo}, partition.Range{Lo: lo, Hi: hi}
			for _, h := range list[lo:hi] {
				known[h] = true
			}
			for _, p := range places {
				if p.member == i {
					x.Send = append(x.Send, headMove{Peer: group*degree + to, Box: Box{p.own, from}, Adds: adds})
				}
				if to == i {
					x.Recv = append(x.Recv, headMove{Peer: group*degree + p.member, Box: Box{p.rows, into}})
				}
			}
		}
	}
	for _, p := range places {
		x.Rows += p.span.Len
	}
	return x
}

// like returns the exchange of a tensor with as many heads as the queries, or with one that all of them share. Each
// rank with query heads then gets a copy, and the gather adds the copies.
func (x *Exchange) like(heads int) *Exchange {
	if heads > 1 {
		return x
	}
	one := Exchange{Rows: x.Rows, Heads: min(x.Heads, 1), Send: slices.Clone(x.Send), Recv: slices.Clone(x.Recv)}
	for i := range one.Send {
		one.Send[i].Box.Heads = partition.Range{Hi: 1}
		one.Send[i].Adds = one.Send[i].Peer != one.Send[0].Peer
	}
	for i := range one.Recv {
		one.Recv[i].Box.Heads = partition.Range{Hi: 1}
	}
	return &one
}

// ulysses plans the ring over groups of p.degree ranks that exchange heads inside. Each rank holds all rows of its
// group for some heads, and exchanges keys with the ranks of other groups that hold the same heads (USP,
// arXiv:2405.07719; LoongTrain, arXiv:2406.18485). One group is Ulysses (Jacobs et al., arXiv:2309.14509), groups of
// one are the ring.
func (p *Planner) ulysses(rank int) *Schedule {
	if p.degree == 1 {
		return p.ring(rank)
	}
	group, i := rank/p.degree, rank%p.degree
	s := p.ring(group)
	s.Rank = rank
	for _, hops := range [][]Hop{s.Backward, s.Forward} {
		for i := range hops {
			p.peersOf(&hops[i], rank)
		}
	}
	g, outer := gathered{p.spec.Layout, p.degree}, p.spec.Size/p.degree
	var q, kv [][]int
	for j := range p.degree {
		mine := partition.Heads(p.spec.Heads, p.degree, j)
		q = append(q, partition.KeyHeads(mine, p.spec.Heads, p.spec.Heads))
		kv = append(kv, partition.KeyHeads(mine, p.spec.Heads, p.spec.KVHeads))
	}
	s.Q = newExchange(g.places(p.spec.SeqQ, outer, group), p.degree, group, i, q)
	s.KV = newExchange(g.places(p.spec.SeqKV, outer, group), p.degree, group, i, kv)
	s.Q.First = partition.Heads(p.spec.Heads, p.degree, i).Lo
	if s.Q.Heads == 0 {
		s.Forward, s.Backward, s.KVBufs, s.GradBufs = nil, nil, make([]Buffer, 1), make([]Buffer, 1)
	}
	return s
}

// peersOf makes a hop between groups one between their members with the heads of rank.
func (p *Planner) peersOf(hop *Hop, rank int) {
	for _, moves := range []*[]Move{&hop.SendKV, &hop.RecvKV, &hop.SendGrad, &hop.RecvGrad} {
		*moves = slices.Clone(*moves) // the two passes share them
		for m := range *moves {
			(*moves)[m].Peer = (*moves)[m].Peer*p.degree + rank%p.degree
		}
	}
}

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
