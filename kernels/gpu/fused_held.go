//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// heldParts is what the pass under way has computed for its queries and is not in the accumulator
// yet.
type heldParts struct {
	dst, lse View // acc.O and acc.LSE, or DQ and the zero View; zero: there is no pass
	into     View // where the end of the pass writes to, if cuDNN can write there, too
	fresh    bool // dst holds nothing
	parts    []fusedPart
	dtype    tensor.DType // of the parts: that of q
	stats    heldStats
	base     int64 // where parts begin in the scratch memory
}

// heldStats is the LSE of a backward pass in the order of axes that cuDNN reads, for rows [lo, hi).
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
	h.parts, h.fresh = h.parts[:0], false
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

// place is where cuDNN leaves O of a group.
func (f *Fused) place(c *fusedCall, g *fusedGroup) (uint64, error) {
	h, rows := &f.held, g.rows.Len()
	if len(h.parts) == 0 && rows == c.q.Len(tensor.Seq) && !h.into.IsZero() && h.into.DType() == c.q.DType() {
		return cuda.Addr(h.into), nil
	}
	return f.scratch.alloc(int64(c.batch()*rows*c.heads()*c.dimV()) * 2)
}

// done says that o holds the only part already, which has all rows. The LSE is still to be copied.
func (h *heldParts) done(o View) bool {
	return o == h.into && h.fresh && len(h.parts) == 1 && h.parts[0].x == cuda.Addr(o) && !h.parts[0].gaps
}
