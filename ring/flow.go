package ring

import "github.com/cprun/cprun/partition"

// A visit is a hop of an owner's block at a rank of the ring, with the rows that ranks need of it.
type visit struct {
	before, here, after partition.Range // of the ranks it visited before, this rank, later ranks
	last                int             // the last hop in which any rank computes with the block; 0: none
}

// summed returns the rows of the gradient that this rank and those before it have added to.
func (v *visit) summed() partition.Range { return v.before.Hull(v.here) }

// carried returns the rows that must arrive here, for this rank or a later one.
func (v *visit) carried() partition.Range { return v.here.Hull(v.after) }

// visits returns the blocks that pass a rank: in hop h the block of the rank h before it.
func (p *Planner) visits(rank int) []visit {
	seen := make([]visit, p.size)
	for h := range seen {
		owner := (rank - h + p.size) % p.size
		if p.table != nil {
			seen[h] = p.table[owner][h]
		} else {
			seen[h] = p.visit(owner, h)
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

// visit returns one visit of owner's block. It asks ranks until the answer cannot change any more. That is soon: under
// most masks a rank nearby needs the whole block.
func (p *Planner) visit(owner, h int) visit {
	if readers, ok := p.index.Readers(owner); ok {
		return p.visitAmong(readers, owner, h)
	}
	v, whole := visit{here: p.need(owner, h), last: p.size - 1}, partition.Range{Hi: p.index.Keys(owner)}
	for v.last > 0 && p.need(owner, v.last).Len() == 0 {
		v.last--
	}
	for j := 1; j < h && v.before != whole; j++ {
		v.before = v.before.Hull(p.need(owner, j))
	}
	for j := h + 1; j <= v.last && v.after != whole; j++ {
		v.after = v.after.Hull(p.need(owner, j))
	}
	return v
}

// visitAmong returns a visit by all ranks that need anything of the block.
func (p *Planner) visitAmong(readers []partition.Need, owner, h int) (v visit) {
	for i := range readers {
		n := &readers[i]
		at := (n.Peer - owner + p.size) % p.size
		v.last = max(v.last, at)
		switch {
		case at == 0: // the owner needs no transfer
		case at < h:
			v.before = v.before.Hull(n.Rows)
		case at == h:
			v.here = n.Rows
		default:
			v.after = v.after.Hull(n.Rows)
		}
	}
	return v
}

// Prepare finds the visits of all blocks, if any travel, for a caller that asks for every rank: it asks for each pair
// of ranks once. Call it before goroutines share the planner.
func (p *Planner) Prepare() {
	if p.algorithm == "allgather" || p.halo {
		return
	}
	p.table = make([][]visit, p.size)
	for owner := range p.table {
		list, last := make([]visit, p.size), 0
		for h := 1; h < p.size; h++ {
			list[h] = visit{before: list[h-1].summed(), here: p.need(owner, h)}
			if list[h].here.Len() > 0 {
				last = h
			}
		}
		for h := p.size - 2; h >= 0; h-- {
			list[h].after = list[h+1].carried()
		}
		for h := range list {
			list[h].last = last
		}
		p.table[owner] = list
	}
}
