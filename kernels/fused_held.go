//go:build cuda

package kernels

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
)

// heldParts is what has been computed for one accumulator and is not in it yet.
type heldParts struct {
	dst, lse View // acc.O and acc.LSE, or DQ and the zero View; zero: nothing is held
	into     View // where Finish will write to, if that is known
	fresh    bool // dst holds nothing
	parts    []fusedPart
	dtype    tensor.DType // of the parts
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

// hold makes dst the accumulator that parts are held for.
func (f *Fused) hold(dst, lse View) {
	if f.held.dst == dst && f.held.lse == lse {
		return
	}
	f.drop()
	f.held = heldParts{dst: dst, lse: lse}
}

// drop folds what is held and forgets the accumulator.
func (f *Fused) drop() {
	f.fold()
	f.held = heldParts{}
	f.scratch.at = 0
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
		f.kernels.mergeInto(f.stream, merging{h.dst, h.dst, h.lse, h.type16(), h.parts, h.fresh, h.fresh})
	}
	h.parts, h.fresh = h.parts[:0], false
	f.scratch.at = h.base
}

// type16 is the type of the parts; without any, one or the other.
func (h *heldParts) type16() tensor.DType {
	if h.dtype == tensor.Invalid {
		return tensor.BF16
	}
	return h.dtype
}

// sumHeld adds the parts of DQ.
func (f *Fused) sumHeld() {
	h := &f.held
	t := gradTotal{dst: h.dst, parts: h.parts, hi: h.dst.Len(tensor.Seq)}
	if h.fresh {
		t.fresh = rowInterval{0, t.hi}
	}
	f.kernels.total(f.stream, h.type16(), t)
}

// Reset forgets what is held for acc. Nothing is written before it is known how it ends.
func (f *Fused) Reset(acc attention.Partial) error {
	if err := fusedAligned("attention reset", acc.O); err != nil {
		return err
	}
	f.stream.Do("attention reset", func() error {
		f.settleKeys()
		if f.held.dst != acc.O {
			f.drop()
		}
		f.held, f.scratch.at = heldParts{dst: acc.O, lse: acc.LSE, fresh: true}, 0
		return nil
	})
	return nil
}

// Into says that Finish will be called with o for the accumulator that was just reset. Nothing else
// reads or writes o until then, so that cuDNN can leave its first result there: it needs no
// other place, and no pass if it is the only one.
func (f *Fused) Into(o View) {
	if o.IsDense() && f.held.fresh && o.Shape() == f.held.dst.Shape() {
		f.held.into = o
	}
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

// Finish merges all that is held into o and acc.LSE in one pass. It does not write acc.O, unless
// o is acc.O.
func (f *Fused) Finish(o View, acc attention.Partial) error {
	if err := attention.CheckFinish(o, acc); err != nil {
		return err
	}
	if err := fusedAligned("attention finish", o, acc.O); err != nil {
		return err
	}
	f.stream.Do("attention finish", func() error {
		f.settleKeys()
		f.hold(acc.O, acc.LSE)
		h := &f.held
		if o.DType() != tensor.F32 && len(h.parts) > 0 && o.DType() != h.dtype {
			return fmt.Errorf("o is %v, and q was %v", o.DType(), h.dtype)
		}
		if len(h.parts) == 0 && o.DType() != tensor.F32 {
			h.dtype = o.DType()
		}
		switch {
		case h.done(o):
			p := h.parts[0]
			f.kernels.copyLSE(f.stream, cuda.Addr(acc.LSE), stridesOf(acc.LSE), p.lse, p.at, o.Len(tensor.Batch), o.Len(tensor.Seq), o.Len(tensor.Heads), false)
		case o != acc.O || len(h.parts) > 0 || h.fresh:
			f.kernels.mergeInto(f.stream, merging{o, acc.O, acc.LSE, h.type16(), h.parts, h.fresh, true})
		}
		f.held, f.scratch.at = heldParts{}, 0
		return nil
	})
	return nil
}

// FinishGrads sums all that is held into DQ, and sets rows of DK and DV to 0 that no call had.
func (f *Fused) FinishGrads(g attention.Grads) error {
	if err := fusedAligned("attention finish", g.DQ); err != nil {
		return err
	}
	f.stream.Do("attention finish", func() error {
		f.settleKeys()
		f.hold(g.DQ, View{})
		f.drop()
		f.settleAll()
		return nil
	})
	return nil
}
