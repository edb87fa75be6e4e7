package attention

import (
	"errors"
	"fmt"

	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// AccumulatorType is the element type of Partial, Grads, LSE and delta for inputs of type t.
func AccumulatorType(t tensor.DType) tensor.DType {
	if t == tensor.F64 {
		return tensor.F64
	}
	return tensor.F32
}

// CheckForward is what is wrong with the arguments of Kernel.Forward: all of it, or nil.
// Kernels call it before they queue anything.
func CheckForward(acc Partial, q, k, v View, tiles []partition.Tile, p Softmax) error {
	c := checker{call: "attention forward"}
	c.inputs(q, k, v, tiles, p)
	t := AccumulatorType(q.DType())
	c.view("O", acc.O, t, outShape(q, v))
	c.view("LSE", acc.LSE, t, rowShape(q))
	return errors.Join(c.faults...)
}

// CheckFinish is what is wrong with the arguments of Kernel.Finish.
func CheckFinish(o View, acc Partial) error {
	c := checker{call: "attention finish"}
	c.float("o", o)
	c.view("o", o, o.DType(), acc.O.Shape())
	c.view("O", acc.O, AccumulatorType(o.DType()), acc.O.Shape())
	return errors.Join(c.faults...)
}

// CheckDelta is what is wrong with the arguments of Kernel.Delta.
func CheckDelta(delta, do, o View) error {
	c := checker{call: "attention delta"}
	c.float("do", do)
	c.float("o", o)
	if do.Shape() != o.Shape() {
		c.fault("do has shape %v, o %v", do.Shape(), o.Shape())
	}
	c.view("delta", delta, AccumulatorType(o.DType()), rowShape(o))
	return errors.Join(c.faults...)
}

// CheckBackward is what is wrong with the arguments of Kernel.Backward.
func CheckBackward(acc Grads, do, q, k, v View, s Saved, tiles []partition.Tile, p Softmax) error {
	c := checker{call: "attention backward"}
	c.inputs(q, k, v, tiles, p)
	t := AccumulatorType(q.DType())
	c.view("do", do, do.DType(), outShape(q, v))
	c.float("do", do)
	c.view("o", s.O, s.O.DType(), outShape(q, v))
	c.view("LSE", s.LSE, t, rowShape(q))
	c.view("delta", s.Delta, t, rowShape(q))
	c.view("DQ", acc.DQ, t, q.Shape())
	c.view("DK", acc.DK, t, k.Shape())
	c.view("DV", acc.DV, t, v.Shape())
	return errors.Join(c.faults...)
}

// outShape is [batch, seqQ, heads, dimV].
func outShape(q, v View) [4]int {
	s := q.Shape()
	s[tensor.Dim] = v.Len(tensor.Dim)
	return s
}

// rowShape is [batch, seqQ, heads, 1].
func rowShape(q View) [4]int {
	s := q.Shape()
	s[tensor.Dim] = 1
	return s
}

type checker struct {
	call   string
	faults []error
}

func (c *checker) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf(c.call+": "+format, args...))
}

func (c *checker) inputs(q, k, v View, tiles []partition.Tile, p Softmax) {
	c.float("q", q)
	c.view("k", k, q.DType(), [4]int{q.Len(tensor.Batch), k.Len(tensor.Seq), k.Len(tensor.Heads), q.Len(tensor.Dim)})
	c.view("v", v, q.DType(), [4]int{q.Len(tensor.Batch), k.Len(tensor.Seq), k.Len(tensor.Heads), v.Len(tensor.Dim)})
	if h, g := q.Len(tensor.Heads), k.Len(tensor.Heads); g == 0 || h%g != 0 {
		c.fault("%d query heads are not a multiple of %d KV heads", h, g)
	}
	if !(p.Softcap >= 0) {
		c.fault("softcap %v is negative", p.Softcap)
	}
	for _, t := range tiles {
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
