package dnn

import "github.com/cprun/cprun/partition"

// NoMask hides nothing.
var NoMask = Mask{Left: -1, Right: -1}

// Piece is a rectangle of queries Q and keys K under a Mask that cuDNN has. Every query of it sees a
// key.
type Piece struct {
	Q, K partition.Range
	Mask Mask
}

// Cut appends to pieces what tile is made of. A band becomes a window, open or not, to the left
// of a diagonal that begins at the top left corner or ends at the bottom right one; what has no
// such diagonal is cut in two by rows. Most tiles are one piece, and without a window no tile is
// more than two.
func Cut(pieces []Piece, tile partition.Tile) []Piece {
	t, ok := tile.Trim()
	if !ok {
		return pieces
	}
	m, n, at := t.Q.Len(), t.K.Len(), t.K.Lo-t.Q.Lo
	lo, hi := t.Band.Lo-at, t.Band.Hi-at // for the piece's own indices: lo <= 0 <= hi
	left, right := lo > 1-m, hi < n-1    // bounds that hide something
	switch {
	case right && hi > 0 && hi != n-m: // the rows from here on are not bounded at the right
		return halves(pieces, t, t.Q.Lo+n-hi)
	case left && m > n: // the rows up to here are not bounded at the left
		return halves(pieces, t, t.Q.Lo-lo)
	}
	p := Piece{Q: t.Q, K: t.K, Mask: NoMask}
	if right {
		p.Mask.Right = 0
		p.Mask.BottomRight = hi > 0
	}
	if left {
		p.Mask.Left = 1 - lo
		if p.Mask.BottomRight {
			p.Mask.Left += hi
		}
	}
	return append(pieces, p)
}

func halves(pieces []Piece, t partition.Tile, row int) []Piece {
	top, bottom := t, t
	top.Q.Hi, bottom.Q.Lo = row, row
	return Cut(Cut(pieces, top), bottom)
}

// Widened gives a piece of one query and one key another one of the keys, which it hides: cuDNN
// has no backward pass for a single pair. Where there is no other key it is returned as it is.
func (p Piece) Widened(keys int) Piece {
	switch {
	case p.Q.Len() > 1 || p.K.Len() > 1:
	case p.K.Hi < keys:
		p.K.Hi++
		p.Mask.Right = 0
	case p.K.Lo > 0:
		p.K.Lo--
		p.Mask = Mask{Left: 1, Right: -1, BottomRight: true}
	}
	return p
}

// Fits says whether mask shows of the piece what its own mask does.
func (p Piece) Fits(mask Mask) bool {
	alo, ahi := p.bounds(p.Mask)
	blo, bhi := p.bounds(mask)
	return alo == blo && ahi == bhi
}

// bounds returns the band of a mask on the piece, no wider than the piece.
func (p Piece) bounds(m Mask) (lo, hi int) {
	rows, keys := p.Q.Len(), p.K.Len()
	lo, hi = 1-rows, keys-1
	shift := 0
	if m.BottomRight {
		shift = keys - rows
	}
	if m.Left >= 0 {
		lo = max(lo, shift+1-m.Left)
	}
	if m.Right >= 0 {
		hi = min(hi, shift+m.Right)
	}
	return lo, hi
}
