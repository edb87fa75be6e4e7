// Package dnn runs the fused attention of cuDNN 9 on a stream. It says which calls of cuDNN make
// up a tile, builds plans for the forward and the backward pass of one problem each, and keeps
// them. cuDNN is loaded when it is first used, so that a binary starts without it. Without the
// build tag cuda only the problems can be described.
package dnn

import (
	"fmt"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Tensor names a tensor of a problem.
type Tensor int

// The tensors. Q, DQ: [batch, heads, SeqQ, Dim]; K, DK: [batch, KVHeads, SeqK, Dim]; V, DV: the
// same with DimV; O, DO: [batch, heads, SeqQ, DimV]; Stats: [batch, heads, SeqQ], the natural
// log of the sum of exp(score), float32. A forward pass reads Q, K, V and writes O and Stats; a
// backward pass reads those and DO and writes DQ, DK, DV.
const (
	Q Tensor = iota
	K
	V
	O
	Stats
	DO
	DQ
	DK
	DV
	Tensors // how many there are
)

// Pointers are the device addresses of an execution: first those of the tensors. A ragged
// problem also has the offsets of each tensor, [batch + 1] int64, the element that a sequence
// begins at, and two vectors of lengths, [batch] int32.
type Pointers [2*Tensors + 2]uint64

// Offsets returns the index of the address of t's offsets.
func Offsets(t Tensor) Tensor { return Tensors + t }

// Indexes of the addresses of the lengths.
const (
	LensQ = 2*Tensors + iota
	LensK
)

// Mask bounds the keys that a query sees: key j if -Left < j-i-shift <= Right; shift is 0, or with BottomRight the keys
// of the sequence less its queries. A negative bound is none. A bound Left is above 0.
type Mask struct {
	Left, Right int
	BottomRight bool
}

// Desc is a problem. Descs are compared to find the plan of one.
type Desc struct {
	Backward, Deterministic bool
	DType                   tensor.DType // bfloat16 or float16
	Batch, Heads, KVHeads   int
	SeqQ, SeqK              int // the longest, where ragged
	Dim, DimV               int
	Strides                 [Tensors][3]int64 // of batch, seq and heads, in elements
	Mask                    Mask
	Scale                   float64
	// TotalQ and TotalK are the rows that ragged sequences lie in; 0: every sequence of the
	// batch has SeqQ queries and SeqK keys.
	TotalQ, TotalK int
	// Loose has the workspace hold Batch sequences of SeqQ and SeqK rows, not TotalQ and TotalK.
	Loose bool
	// Unified asks for the one node that newer versions have for a forward pass.
	Unified bool
}

func (d Desc) String() string {
	pass := "forward"
	if d.Backward {
		pass = "backward"
	}
	if d.Deterministic {
		pass = "deterministic " + pass
	}
	mask := "full"
	if d.Mask.Left >= 0 || d.Mask.Right >= 0 {
		corner := "top left"
		if d.Mask.BottomRight {
			corner = "bottom right"
		}
		mask = fmt.Sprintf("%s band (%d, %d)", corner, d.Mask.Left, d.Mask.Right)
	}
	if d.TotalQ > 0 {
		mask += fmt.Sprintf(", packed in %d and %d rows", d.TotalQ, d.TotalK)
	}
	return fmt.Sprintf("%s, %v, batch %d, heads %d:%d, %d queries by %d keys, head dims %d and %d, %s",
		pass, d.DType, d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK, d.Dim, d.DimV, mask)
}

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
// has no backward pass for a single pair. If there is no other key it is returned as it is.
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
