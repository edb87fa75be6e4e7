package ring

import "github.com/cprun/cprun/partition"

// windowed reports whether a mask hides keys on both sides of a query, so that what a rank needs does not
// grow with the sequence.
func windowed(s partition.Shape) bool {
	return s.Mask.Lo > 1-s.SeqQ && s.Mask.Hi < s.SeqKV-1
}

// nearby reports whether every rank needs at most two blocks of the others' keys. Then it can fetch them
// at once in no more memory than the two blocks that a ring keeps. It sends no more either, since in a
// ring rows pass through ranks that do not need them. The answer is one for all ranks, and each finds
// it: it asks every pair of ranks, up to the first rank that needs more.
func (p *Planner) nearby() bool {
	block := 0
	for r := range p.size {
		block = max(block, p.index.Keys(r))
	}
	for rank := range p.size {
		rows := 0
		for owner := range p.size {
			if owner != rank {
				rows += p.index.Needs(rank, owner).Len()
			}
			if rows > 2*block {
				return false
			}
		}
	}
	return true
}
