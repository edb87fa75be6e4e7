// Package dnn runs the fused attention of cuDNN 9 on a stream. Cut splits a tile into pieces that cuDNN supports. A
// Desc describes the forward or backward pass of a piece, and a Handle builds and caches its plan:
//
//	h, err := dnn.Open(stream)
//	plan, err := h.Plan(desc)
//	err = h.Execute(plan, &addresses, workspace)
//
// Open loads cuDNN, so a binary starts without it. Without the build tag cuda, the package only describes problems.
package dnn

import (
	"fmt"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Tensor names a tensor of a problem.
type Tensor int

// The tensors. Q, DQ: [batch, heads, SeqQ, Dim]; K, DK: [batch, KVHeads, SeqK, Dim]; V, DV: the same with DimV; O, DO:
// [batch, heads, SeqQ, DimV]; Stats: [batch, heads, SeqQ], the natural log of the sum of exp(score), float32. A forward
// pass reads Q, K, V and writes O and Stats. A backward pass reads Q, K, V, O, Stats and DO, and writes DQ, DK, DV.
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
	Tensors // number of tensors
)

// Pointers holds the device addresses of an execution: first the tensors. A ragged problem also has, for each tensor,
// the offsets of the sequences in elements, [batch + 1] int64, and two vectors of lengths, [batch] int32.
type Pointers [2*Tensors + 2]uint64

// Offsets returns the index of the address of t's offsets.
func Offsets(t Tensor) Tensor { return Tensors + t }

// Indexes of the addresses of the lengths.
const (
	LensQ = 2*Tensors + iota
	LensK
)

// Mask limits the visible keys: query i sees key j if -Left < j-i-shift <= Right. shift is 0, or with BottomRight the
// number of keys minus the number of queries. A negative bound means no bound; Left is not 0.
type Mask struct {
	Left, Right int
	BottomRight bool
}

// Desc is a problem. It is the key of the cached plans.
type Desc struct {
	Backward, Deterministic bool
	DType                   tensor.DType // bfloat16 or float16
	Batch, Heads, KVHeads   int
	SeqQ, SeqK              int // of a ragged problem, the longest
	Dim, DimV               int
	Strides                 [Tensors][3]int64 // of batch, seq and heads, in elements
	Mask                    Mask
	Scale                   float64
	// TotalQ and TotalK are the total rows of ragged sequences. 0: every sequence of the batch has SeqQ queries and
	// SeqK keys.
	TotalQ, TotalK int
	// Loose sizes the workspace for Batch sequences of SeqQ and SeqK rows, not for TotalQ and TotalK.
	Loose bool
	// Unified selects the single node for a forward pass in newer versions of cuDNN.
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

// Piece is a rectangle of queries Q and keys K under a Mask that cuDNN supports. Every query sees a key.
type Piece struct {
	Q, K partition.Range
	Mask Mask
}

// Cut appends the pieces of tile to pieces. A band becomes a window, bounded or not, to the left of a diagonal that
// begins at the top left corner or ends at the bottom right corner. A tile without such a diagonal is split by rows.
// Most tiles are one piece; without a window, no tile has more than two.
func Cut(pieces []Piece, tile partition.Tile) []Piece {
	t, ok := tile.Trim()
	if !ok {
		return pieces
	}
	m, n, at := t.Q.Len(), t.K.Len(), t.K.Lo-t.Q.Lo
	lo, hi := t.Band.Lo-at, t.Band.Hi-at // relative to the piece: lo <= 0 <= hi
	left, right := lo > 1-m, hi < n-1    // bounds that hide keys
	switch {
	case right && hi > 0 && hi != n-m: // later rows have no bound at the right
		return halves(pieces, t, t.Q.Lo+n-hi)
	case left && m > n: // earlier rows have no bound at the left
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

// Widened adds a hidden key to a piece of one query and one key, since cuDNN has no backward pass for a single pair. It
// returns other pieces unchanged, and also this one if there is no other key.
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

// gradTail is a number of keys whose removal leaves no multiple of 64.
const gradTail = 24

// AppendGrad appends p to the pieces of a backward pass, in two parts if cuDNN would return NaN. On Hopper it gives the
// padding of the last keys a score of 0, unless there is a mask; exp(-LSE) overflows below an LSE of -88.7. It pads 64
// keys modulo 128, and one query over a multiple of 64 keys (pytorch#196678, cudnn-frontend#1072; measured with 9.19).
func (p Piece) AppendGrad(pieces []Piece) []Piece {
	n := p.K.Len()
	if p.Mask != NoMask || n%64 != 0 || n%128 == 0 && p.Q.Len() > 1 {
		return append(pieces, p)
	}
	tail := p
	p.K.Hi -= gradTail
	tail.K.Lo = p.K.Hi
	return append(pieces, p, tail)
}

// Fits reports whether mask shows the same pairs of the piece as its own mask.
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
