package partition

// Halo reports whether a mask hides keys on both sides of a query, so that what a rank needs does not grow with
// the sequence, and every rank needs at most two blocks of the others' keys. Then it can fetch
// them at once in no more memory than the two blocks that a ring keeps. It sends no more either, since in a
// ring rows pass through ranks that do not need them. The answer is one for all ranks, and each finds
// it: it asks every pair of ranks, up to the first rank that needs more.
func (x *Index) Halo() bool {
	if !x.windowed {
		return false
	}
	block := 0
	for r := range x.k {
		block = max(block, x.Keys(r))
	}
	for rank := range x.q {
		if x.othersOf(rank, 2*block) > 2*block {
			return false
		}
	}
	return true
}

// othersOf returns how many rows rank needs of others, or any number above most.
func (x *Index) othersOf(rank, most int) (rows int) {
	if list, ok := x.Owners(rank); ok {
		for _, n := range list {
			if n.Peer != rank {
				rows += n.Rows.Len()
			}
		}
		return rows
	}
	for owner := range x.k {
		if owner != rank {
			rows += x.Needs(rank, owner).Len()
		}
		if rows > most {
			break
		}
	}
	return rows
}
