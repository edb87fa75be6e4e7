//go:build cuda

package kernels

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
)

// rowInterval is rows [lo, hi).
type rowInterval struct{ lo, hi int }

func (i rowInterval) len() int { return max(i.hi-i.lo, 0) }

// freshRows is rows of a gradient of k or v that count as 0 but have not been written.
type freshRows struct {
	v    View
	rows rowInterval
}

// ResetGrads notes what counts as 0 from here on. The next call overwrites it instead of adding
// to it, or writes the zeros where it has nothing else.
func (f *Fused) ResetGrads(g attention.Grads) error {
	for _, v := range []View{g.DQ, g.DK, g.DV} {
		if v.IsZero() {
			continue
		}
		if err := fusedAligned("attention reset", v); err != nil {
			return err
		}
	}
	f.stream.Do("attention reset", func() error {
		f.settleKeys()
		if !g.DQ.IsZero() {
			if f.held.dst != g.DQ {
				f.drop()
			}
			f.held, f.scratch.at = heldParts{dst: g.DQ, fresh: true}, 0
		}
		for _, v := range []View{g.DK, g.DV} {
			if !v.IsZero() && v.Size() > 0 {
				f.settle(v)
				f.fresh = append(f.fresh, freshRows{v, rowInterval{0, v.Len(tensor.Seq)}})
			}
		}
		return nil
	})
	return nil
}

// within is where the rows of x lie among those of v, if they are rows of one tensor.
func (x freshRows) within(v View) (rowInterval, bool) {
	a, b := x.v.Shape(), v.Shape()
	a[tensor.Seq], b[tensor.Seq] = 0, 0
	if a != b || x.v.Strides() != v.Strides() || x.v.DType() != v.DType() {
		return rowInterval{}, false
	}
	step, off := v.Stride(tensor.Seq), x.v.Offset()-v.Offset()
	if step == 0 || off%step != 0 {
		return rowInterval{}, false
	}
	shift := int(off / step)
	return rowInterval{x.rows.lo + shift, x.rows.hi + shift}, true
}

// take removes the rows of v from what is fresh and returns them, as indices of v. Rows beside
// them, and others in the same memory, are set to 0.
func (f *Fused) take(v View) rowInterval {
	var out rowInterval
	f.each(v, func(x freshRows) {
		rows, ok := x.within(v)
		n := v.Len(tensor.Seq)
		if !ok || out.len() > 0 || rows.lo >= n || rows.hi <= 0 {
			f.zero(x.v, x.rows)
			return
		}
		out = rowInterval{max(rows.lo, 0), min(rows.hi, n)}
		f.zero(x.v, rowInterval{x.rows.lo, x.rows.lo + out.lo - rows.lo})
		f.zero(x.v, rowInterval{x.rows.hi - (rows.hi - out.hi), x.rows.hi})
	})
	return out
}

// settle sets to 0 what is fresh and overlaps v.
func (f *Fused) settle(v View) {
	f.each(v, func(x freshRows) { f.zero(x.v, x.rows) })
}

func (f *Fused) settleAll() {
	for _, x := range f.fresh {
		f.zero(x.v, x.rows)
	}
	f.fresh = f.fresh[:0]
}

// each calls use for what is fresh and may overlap v, and removes it.
func (f *Fused) each(v View, use func(freshRows)) {
	kept := f.fresh[:0]
	for _, x := range f.fresh {
		if !overlapping(x.v, v) {
			kept = append(kept, x)
			continue
		}
		use(x)
	}
	f.fresh = kept
}

// overlapping says whether the addresses that a and b span have one in common.
func overlapping(a, b View) bool {
	a0, a1 := addressSpan(a)
	b0, b1 := addressSpan(b)
	return a0 < b1 && b0 < a1
}

func addressSpan(v View) (lo, hi uint64) {
	if v.Size() == 0 {
		return 0, 0
	}
	n := int64(1)
	for a := tensor.Batch; a <= tensor.Dim; a++ {
		n += int64(v.Len(a)-1) * v.Stride(a)
	}
	lo = cuda.Addr(v)
	return lo, lo + uint64(n)*uint64(v.DType().Size())
}

// zero sets rows to 0.
func (f *Fused) zero(v View, rows rowInterval) {
	if rows.len() > 0 {
		f.kernels.total(f.stream, tensor.BF16, gradTotal{dst: v, lo: rows.lo, hi: rows.hi, fresh: rows})
	}
}
