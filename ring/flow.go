package ring

import (
	"iter"

	"github.com/cprun/cprun/partition"
)

// A stop is one visit of an owner's block at a rank, with the rows that ranks need of it.
type stop struct {
	before, here, after partition.Range // the rows for earlier visits, for this rank, for later visits
	last                int             // the last hop in which a rank computes with the block; 0: none
}

// summed returns the rows of the gradient that this rank and earlier ones have added to.
func (s *stop) summed() partition.Range { return s.before.Hull(s.here) }

// carried returns the rows that must arrive here, for this rank or a later one.
func (s *stop) carried() partition.Range { return s.here.Hull(s.after) }

// stops returns the blocks that pass a rank: in hop h the block of the rank h before it.
func (p *Planner) stops(rank int) []stop {
	seen := make([]stop, p.size)
	for h := range seen {
		owner := (rank - h + p.size) % p.size
		if p.table != nil {
			seen[h] = p.table[owner][h]
		} else {
			seen[h] = p.stop(owner, h)
		}
	}
	return seen
}

// need returns the rows of owner's block that the rank h after it needs. The owner itself needs no transfer.
func (p *Planner) need(owner, h int) partition.Range {
	if h == 0 {
		return partition.Range{}
	}
	return p.index.Needs((owner+h)%p.size, owner)
}

// stop returns one stop of owner's block. It asks ranks until the answer cannot change any more. Under most masks that is
// soon, since a near rank needs the whole block.
func (p *Planner) stop(owner, h int) stop {
	if readers, ok := p.index.Readers(owner); ok {
		return p.stopAmong(readers, owner, h)
	}
	s := stop{here: p.need(owner, h), last: p.size - 1}
	for s.last > h && p.need(owner, s.last).Len() == 0 {
		s.last--
	}
	if s.last == h && s.here.Len() == 0 {
		for s.last > 0 && p.need(owner, s.last).Len() == 0 {
			s.last--
		}
	}
	whole := partition.Range{Lo: 0, Hi: p.index.Keys(owner)}
	for j := 1; j < h && s.before != whole; j++ {
		s.before = s.before.Hull(p.need(owner, j))
	}
	for j := h + 1; j <= s.last && s.after != whole; j++ {
		s.after = s.after.Hull(p.need(owner, j))
	}
	return s
}

// stopAmong returns a stop by the list of all readers of the block.
func (p *Planner) stopAmong(readers []partition.Need, owner, h int) (s stop) {
	for i := range readers {
		n := &readers[i]
		at := n.Peer - owner
		if at < 0 {
			at += p.size
		}
		s.last = max(s.last, at)
		switch {
		case at == 0: // the owner needs no transfer
		case at < h:
			s.before = s.before.Hull(n.Rows)
		case at == h:
			s.here = n.Rows
		default:
			s.after = s.after.Hull(n.Rows)
		}
	}
	return s
}

// remember keeps the stops of all blocks, if the algorithm has any, for a caller that asks for every rank. It asks for
// each pair of ranks once.
func (p *Planner) remember() {
	if p.algorithm == "allgather" || p.halo {
		return
	}
	p.table = make([][]stop, p.size)
	for owner := range p.table {
		p.table[owner] = p.visits(owner)
	}
}

// visits returns the stops of owner's block, hop by hop.
func (p *Planner) visits(owner int) []stop {
	stops := make([]stop, p.size)
	last := 0
	for h := 1; h < p.size; h++ {
		stops[h] = stop{before: stops[h-1].summed(), here: p.need(owner, h)}
		if stops[h].here.Len() > 0 {
			last = h
		}
	}
	for h := p.size - 2; h >= 0; h-- {
		stops[h].after = stops[h+1].carried()
	}
	for h := range stops {
		stops[h].last = last
	}
	return stops
}

// ahead yields the ranks that may need keys of rank, from the next one around to the one before it.
func (p *Planner) ahead(rank int) iter.Seq[int] {
	return func(yield func(int) bool) {
		list, ok := p.index.Readers(rank)
		if !ok {
			for d := 1; d < p.size; d++ {
				if !yield((rank + d) % p.size) {
					return
				}
			}
			return
		}
		next := firstFrom(list, rank+1)
		for i := range list {
			if peer := list[(next+i)%len(list)].Peer; peer != rank && !yield(peer) {
				return
			}
		}
	}
}

// behind yields the ranks that rank may need keys of, from the one before it back around to the next one.
func (p *Planner) behind(rank int) iter.Seq[int] {
	return func(yield func(int) bool) {
		list, ok := p.index.Owners(rank)
		if !ok {
			for d := 1; d < p.size; d++ {
				if !yield((rank - d + p.size) % p.size) {
					return
				}
			}
			return
		}
		next := firstFrom(list, rank)
		for i := range list {
			if peer := list[(next-1-i+2*len(list))%len(list)].Peer; peer != rank && !yield(peer) {
				return
			}
		}
	}
}

// firstFrom returns the first of the needs, sorted by peer, with a peer not before rank.
func firstFrom(list []partition.Need, rank int) int {
	i := 0
	for i < len(list) && list[i].Peer < rank {
		i++
	}
	return i
}
