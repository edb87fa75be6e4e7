//go:build cuda

package gpu

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

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
