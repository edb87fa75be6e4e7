//go:build cuda

package gpu

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A fusedGroup has pieces with disjoint queries, whose results form one part. The pieces of a packed group have the
// same mask and share one call of cuDNN; in a backward pass, their keys are disjoint also, since a call sets gradients.
type fusedGroup struct {
	pieces   []dnn.Piece
	rows     partition.Range // from the first query to the last
	keys     partition.Range
	mask     dnn.Mask
	packed   bool
	backward bool
}

func newGroup(p dnn.Piece, packed, backward bool) *fusedGroup {
	return &fusedGroup{pieces: []dnn.Piece{p}, rows: p.Q, keys: p.K, mask: p.Mask, packed: packed, backward: backward}
}

// runs returns the rows of the pieces and joins adjacent ones.
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

func (g *fusedGroup) gaps() bool { return covered(g.runs()) < g.rows.Len() }

// keyGaps does the same for keys.
func (g *fusedGroup) keyGaps() bool {
	n := 0
	for _, p := range g.pieces {
		n += p.K.Len()
	}
	return n < g.keys.Len()
}

// take adds a piece if it fits the group. Callers pass pieces in order of their queries.
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

// grouped returns the groups of cuDNN calls for the tiles of c.
func (f *Fused) grouped(c *fusedCall, tiles []partition.Tile) []*fusedGroup {
	packed := f.options.Packed && f.packing.takes(c)
	pieces := cutTiles(tiles)
	if c.backward && !packed { // packed calls mask their padding
		var safe []dnn.Piece
		for _, p := range pieces {
			safe = p.AppendGrad(safe)
		}
		pieces = safe
	}
	groups := grouped(pieces, packed, c.backward)
	if packed && c.backward && c.batch() > 1 {
		// Gradients of some of the rows would have other offsets than the rows.
		for _, g := range groups {
			g.rows, g.keys = partition.Range{Hi: c.q.Len(tensor.Seq)}, partition.Range{Hi: c.k.Len(tensor.Seq)}
		}
	}
	return groups
}

// grouped puts each piece into the first group that takes it.
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

// groupedByMask makes packed groups. Each has the mask of the largest remaining piece, since short documents fit most
// masks.
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

// heldKeys holds cuDNN's gradients of k and v of the last block before a fold. The fold reads the received gradients
// and these 16-bit parts, and writes the sum in one pass over memory.
type heldKeys struct {
	dtype tensor.DType // of the parts
	k, v  gradTotal    // no parts: empty
}

// flushKeys adds the held gradients of k and v. It must run before the scratch memory is reused.
func (f *Fused) flushKeys() {
	h := &f.keys
	if len(h.k.parts) > 0 {
		f.kernels.total(f.stream, h.dtype, h.k, h.v)
	}
	h.k, h.v = gradTotal{}, gradTotal{}
}

// Fold adds received gradients of keys, together with the held ones.
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

// A keySum adds gradients of k and v to the accumulators of a block. k and v are the rows that are not written yet.
// With hold, the last gradients become heldKeys.
type keySum struct {
	f    *Fused
	c    *fusedCall
	hold bool
	k, v partition.Range
}

// add adds dk and dv, dense, of the keys. With last, it also zeroes the rows that are not written yet.
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
	case fresh.Lo < keys.Hi && keys.Lo < fresh.Hi: // also writes the rows before the keys
		t.lo, t.fresh = min(t.lo, fresh.Lo), partition.Range{Lo: fresh.Lo, Hi: min(fresh.Hi, keys.Hi)}
		*fresh = partition.Range{Lo: keys.Hi, Hi: max(fresh.Hi, keys.Hi)}
	}
	return t
}

// zero zeroes the rows that no group has written.
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

// heldParts holds results of the current pass that are not in the accumulator yet.
type heldParts struct {
	dst, lse View // acc.O and acc.LSE, or DQ and the zero View; zero: no pass
	into     View // the pass's output, if cuDNN can write it
	fresh    bool // dst is not initialised
	parts    []fusedPart
	dtype    tensor.DType // of the parts: q's type
	stats    heldStats
	base     int64 // offset of the parts in the scratch memory
	// direct lists the rows that calls wrote to into; they are parts[0].
	direct []partition.Range
}

// heldStats is the LSE of a backward pass in cuDNN's order of axes, for rows [lo, hi).
type heldStats struct {
	at     uint64
	src    View
	lo, hi int
	order  axisStrides
}

// fold adds the held parts to the accumulator.
func (f *Fused) fold() {
	h := &f.held
	if h.dst.IsZero() || len(h.parts) == 0 && !h.fresh {
		return
	}
	if h.lse.IsZero() {
		t := gradTotal{dst: h.dst, parts: h.parts, hi: h.dst.Len(tensor.Seq)}
		if h.fresh {
			t.fresh = partition.Range{Hi: t.hi}
		}
		f.kernels.total(f.stream, h.dtype, t)
	} else {
		f.kernels.mergeInto(f.stream, merging{h.dst, h.dst, h.lse, h.dtype, h.parts, h.fresh, h.fresh})
	}
	h.parts, h.direct, h.fresh = h.parts[:0], nil, false
	f.scratch.at = h.base
}

// place allocates the memory for O and the LSE of a group: in into, if no earlier call wrote these rows, or else a new
// part. shared reports whether it belongs to parts[0].
func (f *Fused) place(c *fusedCall, g *fusedGroup) (at fusedPart, shared bool, err error) {
	h, rows, all := &f.held, g.rows.Len(), c.q.Len(tensor.Seq)
	at = fusedPart{at: denseRows(rows, c.heads(), 1), lo: g.rows.Lo, hi: g.rows.Hi, gaps: g.gaps()}
	alloc := func(rows, width int) (uint64, error) {
		return f.scratch.alloc(int64(c.batch()*rows*c.heads()) * int64(width))
	}
	into := !h.into.IsZero() && h.into.DType() == c.q.DType()
	switch {
	case into && g.packed && c.batch() == 1 && h.takes(g):
		if len(h.parts) == 0 {
			whole := fusedPart{x: h.into.Addr(), at: denseRows(all, c.heads(), 1), hi: all}
			if whole.lse, err = alloc(all, 4); err != nil {
				return at, false, err
			}
			if covered(g.runs()) < all {
				f.kernels.fill32(f.stream, whole.lse, all*c.heads(), math.Inf(-1))
			}
			h.parts = append(h.parts, whole)
		}
		h.direct = append(h.direct, g.runs()...)
		h.parts[0].gaps = covered(h.direct) < all
		first := uint64(g.rows.Lo * c.heads())
		at.x, at.lse = h.parts[0].x+first*uint64(c.dimV()*2), h.parts[0].lse+first*4
		return at, true, nil
	case into && len(h.parts) == 0 && rows == all:
		at.x = h.into.Addr()
	default:
		if at.x, err = alloc(rows, 2*c.dimV()); err != nil {
			return at, false, err
		}
	}
	if at.lse, err = alloc(rows, 4); err == nil && at.gaps {
		f.kernels.fill32(f.stream, at.lse, c.batch()*rows*c.heads(), math.Inf(-1))
	}
	return at, false, err
}

// takes reports whether the group can go to into: all held rows are there, and none of the group's.
func (h *heldParts) takes(g *fusedGroup) bool {
	if len(h.parts) > 0 && len(h.direct) == 0 {
		return false
	}
	for _, r := range g.runs() {
		for _, d := range h.direct {
			if r.Lo < d.Hi && d.Lo < r.Hi {
				return false
			}
		}
	}
	return true
}

func covered(ranges []partition.Range) (n int) {
	for _, r := range ranges {
		n += r.Len()
	}
	return n
}

// done reports whether o already holds the only part, with all rows. The LSE must still be copied.
func (h *heldParts) done(o View) bool {
	return o == h.into && h.fresh && len(h.parts) == 1 && h.parts[0].x == o.Addr() && !h.parts[0].gaps
}

// Planning returns a kernel that only builds cuDNN's plans; see attention.Planner.
func (f *Fused) Planning() attention.Kernel { return fusedPlanning{f: f} }

// fusedPlanning builds the plans of passes and computes nothing.
type fusedPlanning struct{ f *Fused }

// Forward begins a pass that builds the plans of one of Fused.
func (p fusedPlanning) Forward(_ View, _ attention.Partial, q View,
	s attention.Softmax) (attention.ForwardPass, error) {
	return planForward{p.f, fusedCall{q: q, scale: s.Scale}}, nil
}

// Backward begins a pass that builds the plans of one of Fused.
func (p fusedPlanning) Backward(_, do, q View, s attention.Saved, x attention.Softmax) (attention.BackwardPass, error) {
	return planBackward{p.f, fusedCall{q: q, do: do, saved: s, scale: x.Scale, backward: true}}, nil
}

type planForward struct {
	f *Fused
	c fusedCall
}

func (p planForward) Block(b attention.Block) error {
	p.c.k, p.c.v = b.K, b.V
	_, err := p.f.planned(&p.c, b.Tiles)
	return err
}

func (planForward) End() error { return nil }

type planBackward struct {
	f *Fused
	c fusedCall
}

func (p planBackward) Block(b attention.GradBlock) error {
	p.c.k, p.c.v, p.c.dk, p.c.dv = b.K, b.V, b.DK, b.DV
	_, err := p.f.planned(&p.c, b.Tiles)
	return err
}

func (planBackward) End() error                { return nil }
func (planBackward) Fold(attention.Fold) error { return nil }

// planned returns the groups of cuDNN calls for the tiles of c, after it has built their plans.
func (f *Fused) planned(c *fusedCall, tiles []partition.Tile) ([]*fusedGroup, error) {
	groups := f.grouped(c, tiles)
	for _, g := range groups {
		if err := f.plans(c, g); err != nil {
			return nil, err
		}
	}
	return groups, nil
}

var _ attention.Planner = (*Fused)(nil)

// fusedScratch allocates device memory as a stack. Work on the stream runs in order, so freed memory can be reused at
// once.
type fusedScratch struct {
	dev *cuda.Device
	mem *cuda.Memory
	at  int64
}

const scratchAlign = 256

func (s *fusedScratch) size() int64 {
	if s.mem == nil {
		return 0
	}
	return s.mem.Bytes()
}

// reserve allocates bytes in one piece. The replaced memory is not freed before the device is closed, since results may
// be in it. FusedWorkspace returns a size that is large enough from the beginning.
func (s *fusedScratch) reserve(bytes int64) error {
	if bytes <= s.size() {
		return nil
	}
	mem, err := s.dev.Alloc(bytes)
	if err != nil {
		return fmt.Errorf("workspace of fused attention: %w", err)
	}
	s.mem, s.at = mem, 0
	return nil
}

// alloc returns the address of an allocation.
func (s *fusedScratch) alloc(bytes int64) (uint64, error) {
	bytes = roundUp64(bytes, scratchAlign)
	if s.at+bytes > s.size() {
		if err := s.reserve(grownScratch(s.size(), s.at+bytes)); err != nil {
			return 0, err
		}
	}
	at := s.at
	s.at += bytes
	return s.mem.Addr() + uint64(at), nil
}
