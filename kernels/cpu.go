// Package kernels computes: attention and the operations of the model, on the CPU, in float32
// or float64. Work is queued on a stream and split over goroutines in pieces that do not
// depend on their number, so that results are the same bits on any machine size.
package kernels

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/tensor"
)

// View is a strided window onto memory; see internal/tensor.
type View = tensor.View

// CPU computes on the host. Its methods queue work on its stream and return at once; faults
// of shape or type are returned by the method, before anything is queued. It implements
// attention.Kernel.
type CPU struct {
	stream  *tensor.HostStream
	scratch []*scratch // one a worker; only work on the stream touches it, one piece at a time
	ops     opsScratch
}

// NewCPU computes on stream, which the caller closes.
func NewCPU(stream *tensor.HostStream) *CPU { return &CPU{stream: stream} }

// Stream is where the work is queued.
func (c *CPU) Stream() *tensor.HostStream { return c.stream }

// Zero sets views of any element type to 0.
func (c *CPU) Zero(vs ...View) error {
	for _, v := range vs {
		if err := onHost("zero", v); err != nil {
			return err
		}
		c.stream.Do("zero", func() error {
			fillAny(v, 0)
			return nil
		})
	}
	return nil
}

// Add adds src to dst, element by element: float32 or float64, of one shape.
func (c *CPU) Add(dst, src View) error {
	if err := onHost("add", dst, src); err != nil {
		return err
	}
	if dst.Shape() != src.Shape() || dst.DType() != src.DType() {
		return fmt.Errorf("add %v to %v: shapes and types must be equal", src, dst)
	}
	switch dst.DType() {
	case tensor.F32:
		c.stream.Do("add", func() error { c.each(dst.Rows(), addRow[float32](dst, src)); return nil })
	case tensor.F64:
		c.stream.Do("add", func() error { c.each(dst.Rows(), addRow[float64](dst, src)); return nil })
	default:
		return fmt.Errorf("add of %v: float32 and float64 can be added", dst.DType())
	}
	return nil
}

// Reset prepares an accumulator for the first Forward: O = 0, LSE = -Inf.
func (c *CPU) Reset(acc attention.Partial) error {
	if err := onHost("reset", acc.O, acc.LSE); err != nil {
		return err
	}
	if t := acc.LSE.DType(); t != tensor.F32 && t != tensor.F64 {
		return fmt.Errorf("reset of %v: LSE is float32 or float64", acc.LSE)
	}
	c.stream.Do("attention reset", func() error {
		fillAny(acc.O, 0)
		fillAny(acc.LSE, math.Inf(-1))
		return nil
	})
	return nil
}

// ResetGrads sets accumulators to 0; see attention.Kernel.
func (c *CPU) ResetGrads(acc attention.Grads) error {
	for _, v := range []View{acc.DQ, acc.DK, acc.DV} {
		if v.IsZero() {
			continue
		}
		if err := c.Zero(v); err != nil {
			return err
		}
	}
	return nil
}

// addRow adds one row, an index of batch and seq together.
func addRow[T tensor.Float](dst, src View) func(row int) {
	if dst.Size() == 0 {
		return func(int) {}
	}
	d, s := tensor.Data[T](dst), tensor.Data[T](src)
	seq, heads, dim := dst.Len(tensor.Seq), dst.Len(tensor.Heads), int64(dst.Len(tensor.Dim))
	dn, sn := dst.Stride(tensor.Dim), src.Stride(tensor.Dim)
	return func(row int) {
		for h := range heads {
			do, so := at(dst, row/seq, row%seq, h), at(src, row/seq, row%seq, h)
			if dn == 1 && sn == 1 {
				y, x := d[do:do+dim], s[so:so+dim]
				for i := range y {
					y[i] += x[i]
				}
				continue
			}
			for i := range dim {
				d[do+i*dn] += s[so+i*sn]
			}
		}
	}
}

// fillAny sets every element to x, which is 0 where the elements are not floats.
func fillAny(v View, x float64) {
	switch v.DType() {
	case tensor.F64:
		fill(v, x)
	case tensor.F32:
		fill(v, float32(x))
	case tensor.F16, tensor.BF16:
		fill(v, uint16(0))
	case tensor.I64:
		fill(v, int64(0))
	case tensor.I32:
		fill(v, int32(0))
	case tensor.U8:
		fill(v, uint8(0))
	}
}

func fill[T tensor.Element](v View, x T) {
	if v.Size() == 0 {
		return
	}
	data := tensor.Data[T](v)
	if v.IsDense() {
		for i := range data {
			data[i] = x
		}
		return
	}
	n, stride := int64(v.Len(tensor.Dim)), v.Stride(tensor.Dim)
	for b := range v.Len(tensor.Batch) {
		for s := range v.Len(tensor.Seq) {
			for h := range v.Len(tensor.Heads) {
				o := at(v, b, s, h)
				for i := range n {
					data[o+i*stride] = x
				}
			}
		}
	}
}

// at is the index, in tensor.Data, of the first element of [b, s, h].
func at(v View, b, s, h int) int64 {
	return int64(b)*v.Stride(tensor.Batch) + int64(s)*v.Stride(tensor.Seq) + int64(h)*v.Stride(tensor.Heads)
}

// onHost is an error that names the first view that this process cannot read.
func onHost(what string, vs ...View) error {
	for _, v := range vs {
		if v.IsZero() {
			return fmt.Errorf("%s: a view without memory", what)
		}
		if _, ok := v.Memory().(*tensor.Host); !ok {
			return fmt.Errorf("%s: %v is not host memory", what, v)
		}
	}
	return nil
}
