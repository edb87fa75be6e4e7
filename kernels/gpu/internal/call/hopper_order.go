package call

import (
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// HopperOrdered returns HopperBackward where blocks of keys take turns to add to dQ, so that its bits are the same
// whenever as many SMs of a GPU compute it. It is for calls that HasOrder.
func (f *Flash) HopperOrdered(s source.HopperShape, sms SMs, fresh partition.Range) HopperBackward {
	l, steps := f.hopperBackward(s, true, fresh)
	if working(steps) == 0 {
		return l
	}
	o := f.orderOf(s, sms.Taken)
	l.Grid[0] = o.blocks * f.K.Len(tensor.Heads)
	l.Progress = l.Grid[0] * l.Grid[2] * s.KeyGroups
	p := &l.Params
	p.Start, p.Blocks, p.Fold, p.Beside = int32(o.start), int32(o.blocks), int32(o.fold), int32(o.beside)
	if o.banded {
		p.Banded = 1
	}
	l.share(sms)
	l.Next = l.Grid[2]
	p.Polls = turnPolls
	if f.Gates != nil {
		p.Polls = 0 // the one before may wait for rows of a peer, for which only the host's deadline is right
	}
	return l
}

// turnPolls limits the polls of a block of keys for its turn to about two minutes.
const turnPolls = 1 << 27

// HasOrder reports whether blocks of keys can add to dQ in order: each goes over the queries of a head from
// the last to the first, and once.
func (f *Flash) HasOrder(s source.HopperShape) bool {
	const most = 1 << 31 // rows that a block counts
	if f.Q.Len(tensor.Heads)/f.K.Len(tensor.Heads)*f.Q.Len(tensor.Seq) >= most {
		return false
	}
	keys := int32(s.OwnKeys())
	own := ownTiles(f.Tiles, true)
	for i, t := range own {
		block := t.OwnLo / keys * keys
		for j := i - 1; j >= 0 && own[j].Reach > block; j-- {
			if own[j].OwnHi > block && own[j].OtherHi > t.OtherLo {
				return false
			}
		}
	}
	return true
}

// An order is how blocks of keys take turns; see turn of hopper_backward.cuh.
type order struct {
	start, blocks int
	banded        bool
	fold, beside  int
}

// orderOf returns the order for a call's tiles.
func (f *Flash) orderOf(s source.HopperShape, sms int) order {
	own := ownTiles(f.Tiles, true)
	keys := s.OwnKeys()
	reach := int(own[len(own)-1].Reach)
	o := order{start: int(own[0].OwnLo) / keys, banded: len(own) == 1}
	o.blocks = (reach+keys-1)/keys - o.start
	if o.banded && shrinks(own[0]) {
		o.fold, o.beside = fold(o.blocks, f.K.Len(tensor.Heads), sms)
	}
	return o
}

// shrinks reports whether the first keys of a tile see its last query, as all do, and the last keys less than half as
// many.
func shrinks(t source.FlashTile) bool {
	queries := func(key int) int {
		first := max(int(t.OtherLo), key+int(t.Lo))
		return min(int(t.OtherHi), key+int(t.Hi)+1) - first
	}
	lo, hi := int(t.OwnLo), int(t.OwnHi)-1
	return lo+int(t.Hi)+1 >= int(t.OtherHi) && 2*queries(hi) < queries(lo)
}

// fold returns how many blocks come from the shortest to the longest before as many come the other way round, and how
// many heads go together, so that the first ones fill the SMs well, and all run at once.
func fold(blocks, heads, sms int) (fold, beside int) {
	const tries = 16
	pairs := (blocks + 1) / 2
	least := (pairs + sms - 1) / sms // parts of a head
	best := 0
	for parts := least; parts < least+tries; parts++ {
		n := (pairs + parts - 1) / parts
		together := min(heads, sms/n)
		if rounds := parts * ((heads + together - 1) / together); best == 0 || rounds < best {
			best, fold, beside = rounds, n, together
		}
	}
	return fold, beside
}
