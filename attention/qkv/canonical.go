package qkv

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/tensor"
)

// Canonical is q, k and v in a known layout.
type Canonical struct {
	Q, K, V tensor.View
	Layout  Layout
	// Copied says which of q, k and v are copies.
	Copied [3]bool
}

// Canonicalize brings q, k and v into a known layout: as they are where Detect finds it
// Exact, else after copies, in a second pass that must succeed. copy makes a dense view of
// new memory, [batch, seq, heads, dim] in that order, with the elements of its argument; it
// is an argument because this package moves no memory. What is dense in that order already is
// not copied. The result of copies is bshd, which at batch 1 is thd too.
//
// A caller that knows the layout of tensors inside a larger buffer needs no copies: it calls Verify
// with that layout.
func Canonicalize(q, k, v tensor.View, copy func(tensor.View) tensor.View) (Canonical, error) {
	out := Canonical{Q: q, K: k, V: v}
	t := Describe(q, k, v)
	l, fit := t.Detect()
	if fit == Exact {
		out.Layout = l
		return out, nil
	}
	if err := t.mismatch(); err != nil {
		return Canonical{}, err
	}
	three := [...]*tensor.View{&out.Q, &out.K, &out.V}
	copyIf := func(needed func(tensor.View) bool) error {
		for i, x := range three {
			if out.Copied[i] || !needed(*x) {
				continue
			}
			dense := copy(*x)
			if dense.Shape() != x.Shape() || dense.DType() != x.DType() || !dense.IsDense() {
				return fmt.Errorf("copy of %c for a known layout: %v of %v is not a dense view of its shape and type", "qkv"[i], dense, *x)
			}
			*x, out.Copied[i] = dense, true
		}
		return nil
	}
	// First what is not dense by itself, then, where the rest still overlaps, that as well.
	for _, needed := range []func(tensor.View) bool{
		func(x tensor.View) bool { return x.Offset() != 0 || !x.IsDense() },
		func(tensor.View) bool { return true },
	} {
		if err := copyIf(needed); err != nil {
			return Canonical{}, err
		}
		// The copies may come out of an arena, so they may begin anywhere in its memory.
		if l, fit = Detect(out.Q, out.K, out.V); fit != Strided {
			out.Layout = l
			return out, nil
		}
	}
	return Canonical{}, errors.New("copies of q, k and v for a known layout overlap; each must have memory of its own")
}
