//go:build cuda

package gpu

import (
	"cmp"
	"slices"

	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// fusedGroup is pieces whose queries do not overlap, so that their results are one part. In a packed
// group all have the mask of the group: cuDNN takes them in one call. Their keys do not overlap
// backward, since each piece sets the gradients of its own.
type fusedGroup struct {
	pieces   []dnn.Piece
	rows     partition.Range // of the queries, from the first to the last
	keys     partition.Range
	mask     dnn.Mask
	packed   bool
	backward bool
}

func newGroup(p dnn.Piece, packed, backward bool) *fusedGroup {
	return &fusedGroup{pieces: []dnn.Piece{p}, rows: p.Q, keys: p.K, mask: p.Mask, packed: packed, backward: backward}
}

// runs returns the rows of the pieces, neighbours joined.
func (g *fusedGroup) runs() []partition.Range {
	var out []partition.Range
	for _, p := range g.pieces {
		if n := len(out); n > 0 && out[n-1].Hi == p.Q.Lo {
			out[n-1].Hi = p.Q.Hi
			continue
		}
		out = append(out, p.Q)
	}
	return out
}

// gaps reports whether rows between the pieces belong to none.
func (g *fusedGroup) gaps() bool { return g.covered() < g.rows.Len() }

func (g *fusedGroup) covered() int {
	n := 0
	for _, p := range g.pieces {
		n += p.Q.Len()
	}
	return n
}

// keyGaps is the same for keys.
func (g *fusedGroup) keyGaps() bool {
	n := 0
	for _, p := range g.pieces {
		n += p.K.Len()
	}
	return n < g.keys.Len()
}

// take adds a piece, whose queries begin no earlier than those of the last one, where it can.
func (g *fusedGroup) take(p dnn.Piece) bool {
	if p.Q.Lo < g.rows.Hi {
		return false
	}
	if g.packed && (g.backward && p.K.Lo < g.keys.Hi || !p.Fits(g.mask)) {
		return false
	}
	g.pieces = append(g.pieces, p)
	g.rows.Hi, g.keys.Lo, g.keys.Hi = p.Q.Hi, min(g.keys.Lo, p.K.Lo), max(g.keys.Hi, p.K.Hi)
	return true
}

// grouped returns the calls of cuDNN that the tiles of c are made of.
func (f *Fused) grouped(c *fusedCall, tiles []partition.Tile) []*fusedGroup {
	packed := f.options.Packed && f.packing.takes(c)
	groups := grouped(cutTiles(tiles), packed, c.backward)
	if packed && c.backward && c.batch() > 1 {
		// Gradients of part of the rows would lie at other offsets than the rows do.
		for _, g := range groups {
			g.rows, g.keys = partition.Range{Hi: c.q.Len(tensor.Seq)}, partition.Range{Hi: c.k.Len(tensor.Seq)}
		}
	}
	return groups
}

// grouped puts pieces into as few groups as is easy.
func grouped(pieces []dnn.Piece, packed, backward bool) []*fusedGroup {
	slices.SortStableFunc(pieces, func(a, b dnn.Piece) int { return cmp.Or(a.Q.Lo-b.Q.Lo, a.K.Lo-b.K.Lo) })
	if packed {
		return groupedByMask(pieces, backward)
	}
	var groups []*fusedGroup
	for _, p := range pieces {
		if !slices.ContainsFunc(groups, func(g *fusedGroup) bool { return g.take(p) }) {
			groups = append(groups, newGroup(p, false, backward))
		}
	}
	return groups
}

// groupedByMask makes packed groups, each around the largest piece that is left, since a mask
// hides the least of short documents and those fit any.
func groupedByMask(pieces []dnn.Piece, backward bool) []*fusedGroup {
	var groups []*fusedGroup
	for len(pieces) > 0 {
		largest := slices.MaxFunc(pieces, func(a, b dnn.Piece) int { return a.Q.Len()*a.K.Len() - b.Q.Len()*b.K.Len() })
		var g *fusedGroup
		left := pieces[:0:0]
		for _, p := range pieces {
			switch {
			case g == nil && p.Fits(largest.Mask):
				g = newGroup(p, true, backward)
				g.mask = largest.Mask
			case g == nil || !g.take(p):
				left = append(left, p)
			}
		}
		groups, pieces = append(groups, g), left
	}
	return groups
}
