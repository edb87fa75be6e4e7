//go:build cuda

package gpu

import (
	"math"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A heldParts is what the pass under way has computed for its queries and is not in the accumulator
// yet.
type heldParts struct {
	dst, lse View // acc.O and acc.LSE, or DQ and the zero View; zero: there is no pass
	into     View // where the end of the pass writes to, if cuDNN can write there, too
	fresh    bool // dst holds nothing
	parts    []fusedPart
	dtype    tensor.DType // of the parts: that of q
	stats    heldStats
	base     int64 // where parts begin in the scratch memory
	// direct is the rows that calls have left in into; they are parts[0].
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

// sumHeld adds the parts of DQ.
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

// covered counts the rows of ranges that do not overlap.
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
