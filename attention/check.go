package attention

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// AccumulatorType returns the element type of Partial, Grads, LSE and delta for inputs of type t.
func AccumulatorType(t tensor.DType) tensor.DType {
	if t == tensor.F64 {
		return tensor.F64
	}
	return tensor.F32
}

// CheckForward returns all that is wrong with the arguments of Kernel.Forward, or nil. Kernels
// call it before they queue anything.
func CheckForward(o View, acc Partial, q View, p Softmax) error {
	c := checker{call: "attention forward"}
	c.queries(q, p)
	t, shape := AccumulatorType(q.DType()), outShape(q, acc.O)
	c.view("O", acc.O, t, shape)
	c.view("LSE", acc.LSE, t, rowShape(q))
	c.float("o", o)
	c.view("o", o, o.DType(), shape)
	c.scores(q, p.Scores, false)
	return errors.Join(c.faults...)
}

// CheckBlock returns all that is wrong with a block of a pass over queries q into O, or nil.
func CheckBlock(O, q View, b Block, p Softmax) error {
	c := checker{call: "attention forward"}
	c.keys(q, b)
	c.columns(b.K, b, p.Scores)
	c.view("O", O, O.DType(), outShape(q, b.V))
	return errors.Join(c.faults...)
}

// CheckBackward returns all that is wrong with the arguments of Kernel.Backward, or nil.
func CheckBackward(dq, do, q View, s Saved, p Softmax) error {
	c := checker{call: "attention backward"}
	c.queries(q, p)
	t, shape := AccumulatorType(q.DType()), outShape(q, do)
	c.view("do", do, do.DType(), shape)
	c.float("do", do)
	c.view("o", s.O, s.O.DType(), shape)
	c.float("o", s.O)
	c.view("LSE", s.LSE, t, rowShape(q))
	c.view("delta", s.Delta, t, rowShape(q))
	c.view("DQ", dq, t, q.Shape())
	c.scores(q, p.Scores, true)
	return errors.Join(c.faults...)
}

// CheckGradBlock returns all that is wrong with a block of a backward pass, or nil.
func CheckGradBlock(do, q View, b GradBlock, p Softmax) error {
	c := checker{call: "attention backward"}
	c.keys(q, b.Block)
	c.columns(b.K, b.Block, p.Scores)
	c.view("do", do, do.DType(), outShape(q, b.V))
	t := AccumulatorType(q.DType())
	rows := max(b.K.Len(tensor.Seq), b.DK.Len(tensor.Seq))
	c.view("DK", b.DK, t, withRows(b.K, rows))
	c.view("DV", b.DV, t, withRows(b.V, rows))
	if b.Fresh.Len() > 0 && !inside(b.Fresh, rows) {
		c.fault("fresh rows %v outside %d rows of DK and DV", b.Fresh, rows)
	}
	return errors.Join(c.faults...)
}

// CheckFold returns all that is wrong with a fold, or nil.
func CheckFold(f Fold) error {
	c := checker{call: "attention fold"}
	for _, x := range []struct {
		name     string
		dst, src View
	}{{"DK", f.Dst.DK, f.Src.DK}, {"DV", f.Dst.DV, f.Src.DV}} {
		n := x.src.Len(tensor.Seq)
		if f.Lo < 0 || f.Lo+n > x.dst.Len(tensor.Seq) {
			c.fault("rows %d to %d of %s, which has %d", f.Lo, f.Lo+n, x.name, x.dst.Len(tensor.Seq))
		}
		if t := x.dst.DType(); t != tensor.F32 && t != tensor.F64 {
			c.fault("%s is %v; sums are float32 or float64", x.name, t)
		}
		c.view(x.name, x.src, x.dst.DType(), withRows(x.dst, n))
	}
	return errors.Join(c.faults...)
}

// Rows returns rows [lo, hi) of both.
func (g KeyGrads) Rows(lo, hi int) KeyGrads {
	return KeyGrads{g.DK.Slice(tensor.Seq, lo, hi), g.DV.Slice(tensor.Seq, lo, hi)}
}

func withRows(v View, n int) [4]int {
	s := v.Shape()
	s[tensor.Seq] = n
	return s
}

func outShape(q, v View) [4]int {
	s := q.Shape()
	s[tensor.Dim] = v.Len(tensor.Dim)
	return s
}

func rowShape(q View) [4]int {
	return [4]int{q.Len(tensor.Batch), q.Len(tensor.Seq), q.Len(tensor.Heads), 1}
}

type checker struct {
	call   string
	faults []error
}

func (c *checker) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf(c.call+": "+format, args...))
}

func (c *checker) queries(q View, p Softmax) {
	c.float("q", q)
	if p.unset() {
		c.fault("Softmax.Scale is not set; it is usually 1/sqrt(head dim)")
	}
	if !(p.Softcap >= 0) {
		c.fault("softcap %v is negative", p.Softcap)
	}
}

func (c *checker) keys(q View, b Block) {
	k, v := b.K, b.V
	c.view("k", k, q.DType(), [4]int{q.Len(tensor.Batch), k.Len(tensor.Seq), k.Len(tensor.Heads), q.Len(tensor.Dim)})
	c.view("v", v, q.DType(), [4]int{q.Len(tensor.Batch), k.Len(tensor.Seq), k.Len(tensor.Heads), v.Len(tensor.Dim)})
	if h, g := q.Len(tensor.Heads), k.Len(tensor.Heads); g == 0 || h%g != 0 {
		c.fault("%d query heads are not a multiple of %d KV heads", h, g)
	}
	for _, g := range b.Gates {
		if !inside(g.Rows, k.Len(tensor.Seq)) {
			c.fault("a gate of rows %v outside %d keys", g.Rows, k.Len(tensor.Seq))
		}
	}
	for _, t := range b.Tiles {
		if !inside(t.Q, q.Len(tensor.Seq)) || !inside(t.K, k.Len(tensor.Seq)) {
			c.fault("tile of queries %v and keys %v outside %d queries and %d keys",
				t.Q, t.K, q.Len(tensor.Seq), k.Len(tensor.Seq))
		}
	}
}

func (c *checker) float(name string, v View) {
	switch v.DType() {
	case tensor.F64, tensor.F32, tensor.F16, tensor.BF16:
	default:
		c.fault("%s has element type %v, which is no float", name, v.DType())
	}
}

func (c *checker) view(name string, v View, t tensor.DType, shape [4]int) {
	if v.DType() != t {
		c.fault("%s has element type %v, not %v", name, v.DType(), t)
	}
	if v.Shape() != shape {
		c.fault("%s has shape %v, not %v", name, v.Shape(), shape)
	}
	if v.Len(tensor.Dim) > 1 && v.Stride(tensor.Dim) != 1 {
		c.fault("%s has stride %d on its last axis, not 1", name, v.Stride(tensor.Dim))
	}
}

func inside(r partition.Range, n int) bool { return 0 <= r.Lo && r.Lo <= r.Hi && r.Hi <= n }
