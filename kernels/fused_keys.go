//go:build cuda

package kernels

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/tensor"
)

// heldKeys is what cuDNN gave for k and v in the last call of Backward, where Hold said that
// AddGrads comes next: one pass then reads what came from another rank and the 16-bit parts in the
// scratch memory, and writes the sum. Whatever else comes next writes the parts first.
type heldKeys struct {
	next  attention.Grads // of the next Backward
	dtype tensor.DType    // of the parts
	k, v  gradTotal       // without parts: nothing is held
}

// Hold says that AddGrads follows the next Backward; see attention.Folder.
func (f *Fused) Hold(acc attention.Grads) { f.keys.next = acc }

// holds says whether the call is the one that Hold told of, and forgets that.
func (f *Fused) holds(acc attention.Grads) bool {
	next := f.keys.next
	f.keys.next = attention.Grads{}
	return !next.DK.IsZero() && next.DK == acc.DK && next.DV == acc.DV
}

// settleKeys completes gradients of k and v that are held. It comes before all that uses the scratch
// memory or any gradient.
func (f *Fused) settleKeys() {
	h := &f.keys
	if len(h.k.parts) > 0 {
		f.kernels.total(f.stream, h.dtype, h.k, h.v)
	}
	h.k, h.v = gradTotal{}, gradTotal{}
}

// Add adds src to dst; see attention.Kernel.
func (f *Fused) Add(dst, src View) error {
	if err := addable(dst, src); err != nil {
		return err
	}
	f.stream.Do("add", func() error {
		f.settleKeys()
		f.settle(dst)
		f.settle(src)
		f.kernels.total(f.stream, tensor.BF16, gradTotal{dst: dst}.withSrc(src, 0))
		return nil
	})
	return nil
}

// AddGrads is Add for DK and DV; see attention.Folder.
func (f *Fused) AddGrads(dst, src attention.Grads) error {
	if err := addable(dst.DK, src.DK); err != nil {
		return err
	}
	if err := addable(dst.DV, src.DV); err != nil {
		return err
	}
	f.stream.Do("add", func() error {
		k, okK := f.keys.k.plus(dst.DK, src.DK)
		v, okV := f.keys.v.plus(dst.DV, src.DV)
		dtype := f.keys.dtype
		if okK && okV {
			f.keys.k, f.keys.v = gradTotal{}, gradTotal{}
		} else {
			f.settleKeys()
			dtype, k, v = tensor.BF16, gradTotal{dst: dst.DK}.withSrc(src.DK, 0), gradTotal{dst: dst.DV}.withSrc(src.DV, 0)
		}
		for _, x := range []View{dst.DK, dst.DV, src.DK, src.DV} {
			f.settle(x)
		}
		f.kernels.total(f.stream, dtype, k, v)
		return nil
	})
	return nil
}

// plus is t with src added to dst, if that is rows of t.dst.
func (t gradTotal) plus(dst, src View) (gradTotal, bool) {
	if len(t.parts) == 0 {
		return t, false
	}
	rows, ok := freshRows{v: dst, rows: rowInterval{0, dst.Len(tensor.Seq)}}.within(t.dst)
	if !ok || rows.lo < 0 || rows.hi > t.dst.Len(tensor.Seq) {
		return t, false
	}
	return t.withSrc(src, rows.lo), true
}

func addable(dst, src View) error {
	if dst.Shape() != src.Shape() || dst.DType() != tensor.F32 || src.DType() != tensor.F32 {
		return fmt.Errorf("add %v to %v: shapes must be equal and types float32", src, dst)
	}
	return fusedAligned("add", dst, src)
}

var _ attention.Folder = (*Fused)(nil)
