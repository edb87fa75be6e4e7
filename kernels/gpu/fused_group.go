//go:build cuda

package gpu

import (
	"cmp"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// fusedGroup is pieces with disjoint queries, so that their results form one part. In a packed group all have the mask
// of the group, and cuDNN takes them in one call. Backward, their keys are disjoint as well, since each piece sets its
// own gradients.
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

func (g *fusedGroup) gaps() bool { return g.covered() < g.rows.Len() }

func (g *fusedGroup) covered() int {
	n := 0
	for _, p := range g.pieces {
		n += p.Q.Len()
	}
	return n
}

// keyGaps returns the same for keys.
func (g *fusedGroup) keyGaps() bool {
	n := 0
	for _, p := range g.pieces {
		n += p.K.Len()
	}
	return n < g.keys.Len()
}

// take adds a piece if it can; its queries begin no earlier than those of the last one.
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

// A heldKeys holds cuDNN's gradients of k and v of the last block before a fold, which then reads the received
// gradients and the 16-bit parts, and writes the sum in one pass over memory.
type heldKeys struct {
	dtype tensor.DType // of the parts
	k, v  gradTotal    // without parts: nothing is held
}

// settleKeys completes gradients of k and v that are held. It comes before all that uses the scratch
// memory.
func (f *Fused) settleKeys() {
	h := &f.keys
	if len(h.k.parts) > 0 {
		f.kernels.total(f.stream, h.dtype, h.k, h.v)
	}
	h.k, h.v = gradTotal{}, gradTotal{}
}

// Fold adds gradients of keys from elsewhere, together with what is held.
func (x *fusedBackward) Fold(fold attention.Fold) error {
	if err := attention.CheckFold(fold); err != nil {
		return err
	}
	if err := fusedAligned("attention fold", fold.Dst.DK, fold.Dst.DV, fold.Src.DK, fold.Src.DV); err != nil {
		return err
	}
	f := x.f
	f.stream.Do("add", func() error {
		dtype, k, v := f.keys.dtype, f.keys.k, f.keys.v
		if len(k.parts) == 0 {
			dtype, k, v = x.q.DType(), gradsOf(fold.Dst.DK, fold.Lo), gradsOf(fold.Dst.DV, fold.Lo)
		}
		f.keys = heldKeys{}
		f.kernels.total(f.stream, dtype, k.withSrc(fold.Src.DK, fold.Lo), v.withSrc(fold.Src.DV, fold.Lo))
		return nil
	})
	return nil
}

func gradsOf(dst View, lo int) gradTotal { return gradTotal{dst: dst, lo: lo, hi: lo} }

// keySum adds gradients of k and v to the accumulators of a block. k and v are the rows of these
// that have not been written yet. With hold, the last ones are held back.
type keySum struct {
	f    *Fused
	c    *fusedCall
	hold bool
	k, v partition.Range
}

// add adds dk and dv, dense, of those keys. With last, it also sets to 0 what is not written
// by then.
func (s *keySum) add(dk, dv uint64, keys partition.Range, last bool) {
	k, v := s.total(s.c.dk, &s.k, dk, keys, last), s.total(s.c.dv, &s.v, dv, keys, last)
	if last && s.hold {
		s.f.keys = heldKeys{dtype: s.c.q.DType(), k: k, v: v}
		return
	}
	s.f.kernels.total(s.f.stream, s.c.q.DType(), k, v)
}

func (s *keySum) total(dst View, fresh *partition.Range, x uint64, keys partition.Range, last bool) gradTotal {
	t := gradTotal{dst: dst, parts: []fusedPart{{x: x, lo: keys.Lo, hi: keys.Hi}}, lo: keys.Lo, hi: keys.Hi}
	if fresh.Len() <= 0 {
		return t
	}
	switch {
	case last:
		t.lo, t.hi, t.fresh = min(t.lo, fresh.Lo), max(t.hi, fresh.Hi), *fresh
		*fresh = partition.Range{}
	case fresh.Lo < keys.Hi && keys.Lo < fresh.Hi: // rows before the keys are written as well
		t.lo, t.fresh = min(t.lo, fresh.Lo), partition.Range{Lo: fresh.Lo, Hi: min(fresh.Hi, keys.Hi)}
		*fresh = partition.Range{Lo: keys.Hi, Hi: max(fresh.Hi, keys.Hi)}
	}
	return t
}

// zero sets the rows that no group has written to 0.
func (s *keySum) zero() {
	for _, x := range []struct {
		v    View
		rows partition.Range
	}{{s.c.dk, s.k}, {s.c.dv, s.v}} {
		if x.rows.Len() > 0 {
			s.f.kernels.total(s.f.stream, s.c.q.DType(), gradTotal{dst: x.v, lo: x.rows.Lo, hi: x.rows.Hi,
				fresh: x.rows})
		}
	}
}
