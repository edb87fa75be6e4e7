//go:build cuda

package gpu

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A heldKeys is what cuDNN gave for k and v in the last block, where a fold comes next: one go over
// memory then reads what came from another rank and the 16-bit parts in the scratch memory, and
// writes the sum.
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

// gradsOf is no sum yet for dst, of which no row before lo is meant.
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
	case fresh.Lo < keys.Hi && keys.Lo < fresh.Hi: // what is before the keys is written, too
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
