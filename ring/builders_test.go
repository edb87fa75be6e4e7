package ring

import (
	"slices"
	"sort"

	"github.com/cprun/cprun/partition"
)

// What follows builds schedules of algorithms that users cannot choose, to show that a Schedule
// carries them. Each is a function of the partition alone, as those of patterns.go are.

// gathered is a layout in which a rank holds what the ranks of an inner group hold in another
// layout: span behind span in the order of the group, or, sorted, in the order of positions, where
// neighbours grow together.
type gathered struct {
	partition.Layout
	inner  int
	sorted bool
}

// place is where a span of a member of the group lies: the local rows of the member, and the rows of
// what is gathered.
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
	if g.sorted {
		sort.SliceStable(all, func(i, j int) bool { return all[i].span.Start < all[j].span.Start })
	}
	at := 0
	for i := range all {
		all[i].rows = partition.Range{Lo: at, Hi: at + all[i].span.Len}
		at += all[i].span.Len
	}
	return all
}

func (g gathered) Spans(n, size, rank int) []partition.Span {
	var spans []partition.Span
	for _, p := range g.places(n, size, rank) {
		if k := len(spans) - 1; k >= 0 && spans[k].Stride == 1 && p.span.Stride == 1 && spans[k].Start+spans[k].Len == p.span.Start {
			spans[k].Len += p.span.Len
			continue
		}
		spans = append(spans, p.span)
	}
	return spans
}

// share is the heads of queries that member i of a group of so many computes.
func share(heads, size, i int) partition.Range {
	return partition.Range{Lo: i * heads / size, Hi: (i + 1) * heads / size}
}

// headsOf is the heads of keys that those heads of queries need, in an order in which a kernel finds
// them: each serves as many heads of queries as the next. Where the share does not begin and end
// with a head of keys, some come several times.
func headsOf(q partition.Range, heads, kvHeads int) []int {
	for group := q.Len(); group > 0; group-- {
		var list []int
		for h := q.Lo; h < q.Hi && q.Len()%group == 0; h += group {
			first, last := h*kvHeads/heads, (h+group-1)*kvHeads/heads
			if first != last {
				list = nil
				break
			}
			list = append(list, first)
		}
		if list != nil {
			return list
		}
	}
	return nil
}

// runs cuts a list of heads into runs of neighbours that have been sent before, or have not.
func runs(list []int, known map[int]bool) (out []headRun) {
	for i, h := range list {
		k := len(out) - 1
		if k >= 0 && out[k].from.Hi == h && out[k].adds == known[h] {
			out[k].from.Hi, out[k].to.Hi = h+1, i+1
		} else {
			out = append(out, headRun{from: partition.Range{Lo: h, Hi: h + 1}, to: partition.Range{Lo: i, Hi: i + 1}, adds: known[h]})
		}
		known[h] = true
	}
	return out
}

type headRun struct {
	from, to partition.Range // of the tensor, and of what is gathered
	adds     bool
}

// trade is the exchange of rank (outer, i): list is the heads that each member of the group wants.
func trade(g gathered, n, size, outer, i int, list [][]int) *Exchange {
	x, known := &Exchange{Heads: len(list[i])}, map[int]bool{}
	for to := range list {
		for _, run := range runs(list[to], known) {
			for _, p := range g.places(n, size, outer) {
				if p.member == i {
					x.Send = append(x.Send, HeadMove{Peer: outer*g.inner + to, Box: Box{p.own, run.from}, Adds: run.adds})
				}
				if to == i {
					x.Recv = append(x.Recv, HeadMove{Peer: outer*g.inner + p.member, Box: Box{p.rows, run.to}})
				}
			}
		}
	}
	for _, p := range g.places(n, size, outer) {
		x.Rows += p.span.Len
	}
	return x
}

// hierarchical is a ring over groups of inner ranks, inside of which ranks trade heads: each holds
// all rows of its group for some heads, and exchanges keys with the ranks of the other groups that
// hold the same heads. With one group it is Ulysses (Jacobs et al., arXiv:2309.14509), with groups
// of one rank it is the ring.
func hierarchical(algorithm string, s partition.Shape, inner int, sorted bool, heads, kvHeads int) ([]*Schedule, error) {
	g := gathered{s.Layout, inner, sorted}
	outer := s
	outer.Size, outer.Layout = s.Size/inner, g
	all, err := All(algorithm, outer)
	if err != nil {
		return nil, err
	}
	var q, kv [][]int
	for i := range inner {
		mine := share(heads, inner, i)
		var list []int
		for h := mine.Lo; h < mine.Hi; h++ {
			list = append(list, h)
		}
		q, kv = append(q, list), append(kv, headsOf(mine, heads, kvHeads))
	}
	var out []*Schedule
	for r := range s.Size {
		group, i := r/inner, r%inner
		sch := *all[group]
		sch.Rank = r
		sch.Forward, sch.Backward = peersOf(sch.Forward, inner, i), peersOf(sch.Backward, inner, i)
		if len(q[i]) == 0 { // more ranks than heads: this one only gives and takes
			own := sch.Backward[0]
			sch.Forward, sch.Backward = nil, []Hop{{Label: own.Label, Keys: own.Keys, Grads: own.Grads}}
		}
		sch.Q, sch.KV = trade(g, s.SeqQ, outer.Size, group, i, q), trade(g, s.SeqKV, outer.Size, group, i, kv)
		out = append(out, &sch)
	}
	return out, nil
}

// peersOf is hops between groups as hops between the i-th members of them.
func peersOf(hops []Hop, inner, i int) []Hop {
	hops = slices.Clone(hops)
	for h := range hops {
		for _, moves := range []*[]Move{&hops[h].SendKV, &hops[h].RecvKV, &hops[h].SendGrad, &hops[h].RecvGrad} {
			*moves = slices.Clone(*moves)
			for m := range *moves {
				(*moves)[m].Peer = (*moves)[m].Peer*inner + i
			}
		}
	}
	return hops
}

// gated is the all-gather in one hop: the keys of each peer are an exchange of their own, and are
// computed as soon as they are there.
func (p *Planner) gated(rank int) *Schedule {
	first, home := p.own(rank), Hop{Label: "gradients home"}
	rows, back := 0, 0
	for d := 1; d < p.size; d++ {
		to, from := (rank+d)%p.size, (rank-d+p.size)%p.size
		var part Part
		if need := p.index.Needs(to, rank); need.Len() > 0 {
			part.SendKV = []Move{move(to, 0, need)}
			b := Block{2, back, back + need.Len()}
			back = b.Hi
			home.RecvGrad = append(home.RecvGrad, Move{to, b})
			home.Fold = append(home.Fold, Fold{Block{0, need.Lo, need.Hi}, b})
		}
		if need := p.index.Needs(rank, from); need.Len() > 0 {
			b := Block{1, rows, rows + need.Len()}
			part.Tiles, part.Keys, part.Grads = shifted(p.index.Tiles(rank, from), rows-need.Lo), b, b
			part.RecvKV = []Move{{from, b}}
			home.SendGrad = append(home.SendGrad, Move{from, b})
			rows = b.Hi
		}
		first.Then = append(first.Then, part)
	}
	hops := []Hop{first, home}
	return p.finish(&Schedule{Algorithm: "gated", Rank: rank, Forward: forwardOf(hops), Backward: hops})
}

// bothWays is a ring in both directions at once: in hop h a rank computes with the blocks of the
// ranks h before it and h behind it, in two calls. Each gradient goes home in the next hop.
func (p *Planner) bothWays(rank int) *Schedule {
	n := p.size
	at := func(r int) int { return (r%n + n) % n }
	last := n / 2
	hops := make([]Hop, last+2)
	hops[0] = p.own(rank)
	for h := 0; h <= last; h++ {
		hop := &hops[h]
		if h > 0 {
			hop.Label = hopLabel(h, at(rank-h))
		}
		for way, sign := range []int{1, -1} {
			if way == 1 && (2*h == n || h == 0) {
				continue // one block comes from both sides
			}
			buf := func(h int) int { return way*2 + kvBuffer(h) } // 1, 2 one way and 3, 4 the other
			owner := at(rank - sign*h)
			if tiles := p.index.Tiles(rank, owner); h > 0 && len(tiles) > 0 {
				need := p.index.Needs(rank, owner)
				grads := Block{way*2 + 1 + h%2, need.Lo, need.Hi}
				call := Part{Keys: Block{buf(h), 0, need.Hi}, Tiles: tiles, Grads: grads}
				if way == 0 {
					hop.Keys, hop.Tiles, hop.Grads = call.Keys, call.Tiles, call.Grads
				} else {
					hop.Then = append(hop.Then, call)
				}
				hops[h+1].SendGrad = append(hops[h+1].SendGrad, Move{owner, grads})
			}
			if need := p.index.Needs(at(rank+sign*h), rank); h > 0 && need.Len() > 0 {
				b := Block{5 + way, need.Lo, need.Hi}
				hops[h+1].RecvGrad = append(hops[h+1].RecvGrad, Move{at(rank + sign*h), b})
				hops[h+1].Fold = append(hops[h+1].Fold, Fold{Block{0, need.Lo, need.Hi}, b})
			}
		}
		for way, sign := range []int{1, -1} {
			if h == last || way == 1 && 2*(h+1) == n {
				continue
			}
			buf := func(h int) int {
				if h == 0 {
					return 0
				}
				return way*2 + kvBuffer(h)
			}
			owner, next := at(rank-sign*h), at(rank-sign*(h+1))
			hop.SendKV = append(hop.SendKV, Move{at(rank + sign), Block{buf(h), 0, p.index.Keys(owner)}})
			hop.RecvKV = append(hop.RecvKV, Move{at(rank - sign), Block{buf(h + 1), 0, p.index.Keys(next)}})
		}
	}
	return p.finish(&Schedule{Algorithm: "both ways", Rank: rank, Forward: forwardOf(hops), Backward: hops})
}
