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

// A heldParts holds results of the current pass that are not in the accumulator yet.
type heldParts struct {
	dst, lse View // acc.O and acc.LSE, or DQ and the zero View; zero: there is no pass
	into     View // the end of the pass writes there, if cuDNN can
	fresh    bool // dst holds nothing
	parts    []fusedPart
	dtype    tensor.DType // of the parts: q's type
	stats    heldStats
	base     int64 // where parts begin in the scratch memory
	// direct lists the rows that calls have left in into; they are parts[0].
	direct []partition.Range
}

// A heldStats is the LSE of a backward pass in the order of axes that cuDNN reads, for rows [lo, hi).
type heldStats struct {
	at     uint64
	src    View
	lo, hi int
	order  axisStrides
}

// fold adds what is held to the accumulator.
func (f *Fused) fold() {
	h := &f.held
	if h.dst.IsZero() || len(h.parts) == 0 && !h.fresh {
		return
	}
	if h.lse.IsZero() {
		f.sumHeld()
	} else {
		f.kernels.mergeInto(f.stream, merging{h.dst, h.dst, h.lse, h.dtype, h.parts, h.fresh, h.fresh})
	}
	h.parts, h.direct, h.fresh = h.parts[:0], nil, false
	f.scratch.at = h.base
}

func (f *Fused) sumHeld() {
	h := &f.held
	t := gradTotal{dst: h.dst, parts: h.parts, hi: h.dst.Len(tensor.Seq)}
	if h.fresh {
		t.fresh = partition.Range{Hi: t.hi}
	}
	f.kernels.total(f.stream, h.dtype, t)
}

// place returns where cuDNN leaves O and the LSE of a group: in into, where no row of the group is that of a call
// before, or else in a part of its own. shared says that it is among the rows of parts[0].
func (f *Fused) place(c *fusedCall, g *fusedGroup) (at fusedPart, shared bool, err error) {
	h, rows, all := &f.held, g.rows.Len(), c.q.Len(tensor.Seq)
	at = fusedPart{at: denseRows(rows, c.heads(), 1), lo: g.rows.Lo, hi: g.rows.Hi, gaps: g.gaps()}
	room := func(rows, width int) (uint64, error) {
		return f.scratch.alloc(int64(c.batch()*rows*c.heads()) * int64(width))
	}
	into := !h.into.IsZero() && h.into.DType() == c.q.DType()
	switch {
	case into && g.packed && c.batch() == 1 && h.takes(g):
		if len(h.parts) == 0 {
			whole := fusedPart{x: cuda.Addr(h.into), at: denseRows(all, c.heads(), 1), hi: all}
			if whole.lse, err = room(all, 4); err != nil {
				return at, false, err
			}
			if g.covered() < all {
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
		at.x = cuda.Addr(h.into)
	default:
		if at.x, err = room(rows, 2*c.dimV()); err != nil {
			return at, false, err
		}
	}
	if at.lse, err = room(rows, 4); err == nil && at.gaps {
		f.kernels.fill32(f.stream, at.lse, c.batch()*rows*c.heads(), math.Inf(-1))
	}
	return at, false, err
}

// takes reports whether all that is held is in into, and no row of the group is.
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

// done says that o holds the only part already, which has all rows. The LSE is still to be copied.
func (h *heldParts) done(o View) bool {
	return o == h.into && h.fresh && len(h.parts) == 1 && h.parts[0].x == cuda.Addr(o) && !h.parts[0].gaps
}

// Planning has cuDNN build plans; see attention.Planner.
func (f *Fused) Planning() attention.Kernel { return fusedPlanning{f: f} }

// fusedPlanning builds the plans of what it is asked for.
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
	return p.f.planAll(&p.c, b.Tiles)
}

func (planForward) End() error { return nil }

type planBackward struct {
	f *Fused
	c fusedCall
}

func (p planBackward) Block(b attention.GradBlock) error {
	p.c.k, p.c.v, p.c.dk, p.c.dv = b.K, b.V, b.DK, b.DV
	return p.f.planAll(&p.c, b.Tiles)
}

func (planBackward) End() error                { return nil }
func (planBackward) Fold(attention.Fold) error { return nil }

func (f *Fused) planAll(c *fusedCall, tiles []partition.Tile) error {
	for _, g := range f.grouped(c, tiles) {
		if err := f.plans(c, g); err != nil {
			return err
		}
	}
	return nil
}

var _ attention.Planner = (*Fused)(nil)

// fusedScratch hands out device memory as a stack. Work on the stream is in order, so that returned memory is free at
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

// reserve makes room for bytes in one piece. Memory that it replaces stays until the device is
// closed, since results may lie in it: FusedWorkspace is there to reserve enough at once.
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

// alloc returns the address of that many bytes.
func (s *fusedScratch) alloc(bytes int64) (uint64, error) {
	bytes = roundUp64(bytes, scratchAlign)
	if s.at+bytes > s.size() {
		if err := s.reserve(grownScratch(s.size(), s.at+bytes)); err != nil {
			return 0, err
		}
	}
	at := s.at
	s.at += bytes
	return uint64(uintptr(s.mem.Ptr())) + uint64(at), nil
}
