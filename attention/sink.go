package attention

import (
	"errors"
	"math"

	"github.com/cprun/cprun/tensor"
)

// Sinks folds sinks into attention: a further score of each head in the denominator of the softmax, without a value.
// A learnable sink is gpt-oss's (arXiv:2508.10925); a constant sink of 0 makes the softmax off by one (Miller,
// "Attention Is Off By One", 2023).
//
// A sink acts as a key that every row sees, with value 0. It is folded once, after the last block of keys,
// independent of ranks, hops and kernels: LSE' = log(exp(LSE) + exp(sink)), O' = O exp(LSE - LSE').
//
// A backward pass that gets O' and LSE' in Saved computes the gradients of q, k and v, since its probabilities are
// exp(s - LSE') and its delta equals rowsum(do * O'). Kernels do not handle sinks.
//
// Rows and heads are a rank's own: a schedule that trades heads for rows gives back O and LSE of all heads before the
// fold, and takes them after it.
type Sinks interface {
	// FoldSink folds sink [1, 1, heads, 1] into o and lse of a whole forward pass, in place; see Partial. o has any
	// type of a kernel's o, lse and sink the type of Partial. A row without keys has O = 0 and the sink as its LSE.
	FoldSink(o, lse, sink View) error
	// SinkGrad sets dsink, like sink, to the gradient of the sinks: the sum over the rows of -exp(sink - LSE')
	// rowsum(do * O'). Ranks have different rows, so the caller adds up their results.
	SinkGrad(dsink, do, o, lse, sink View) error
}

// CheckFoldSink returns all that is wrong with the arguments of Sinks.FoldSink, or nil.
func CheckFoldSink(o, lse, sink View) error {
	c := checker{call: "attention sink"}
	c.sink(o, lse, sink)
	return errors.Join(c.faults...)
}

// CheckSinkGrad returns all that is wrong with the arguments of Sinks.SinkGrad, or nil.
func CheckSinkGrad(dsink, do, o, lse, sink View) error {
	c := checker{call: "attention sink gradient"}
	c.sink(o, lse, sink)
	c.float("do", do)
	c.view("do", do, do.DType(), o.Shape())
	c.view("dsink", dsink, lse.DType(), sink.Shape())
	if !dsink.IsDense() {
		c.fault("dsink is not dense")
	}
	return errors.Join(c.faults...)
}

func (c *checker) sink(o, lse, sink View) {
	c.float("o", o)
	t := lse.DType()
	if t != tensor.F32 && t != tensor.F64 {
		c.fault("LSE is %v, not float32 or float64", t)
	}
	c.view("o", o, o.DType(), o.Shape())
	c.view("LSE", lse, t, rowShape(o))
	c.view("sink", sink, t, [4]int{1, 1, o.Len(tensor.Heads), 1})
	if !sink.IsDense() {
		c.fault("sink is not dense")
	}
}

// FoldSink folds sinks in; see Sinks.
func (r *Reference[A]) FoldSink(o, lse, sink View) error {
	if err := CheckFoldSink(o, lse, sink); err != nil {
		return err
	}
	return r.do("attention sink", func() {
		oa, la, sa := load[A](o), load[A](lse), load[A](sink)
		foldSink(oa, la, sa)
		oa.store(o)
		la.store(lse)
	})
}

// SinkGrad sets dsink; see Sinks.
func (r *Reference[A]) SinkGrad(dsink, do, o, lse, sink View) error {
	if err := CheckSinkGrad(dsink, do, o, lse, sink); err != nil {
		return err
	}
	return r.do("attention sink gradient", func() {
		d := load[A](dsink)
		sinkGrad(d, load[A](do), load[A](o), load[A](lse), load[A](sink))
		d.store(dsink)
	})
}

func foldSink[A tensor.Float](o, lse, sink array[A]) {
	eachHead(o, func(b, i, h int) {
		old := &lse.row(b, i, h)[0]
		with := logAddExp(*old, sink.row(0, 0, h)[0])
		if math.IsInf(float64(with), -1) {
			return // neither a key nor the sink has any weight
		}
		scale(exp(*old-with), o.row(b, i, h))
		*old = with
	})
}

func sinkGrad[A tensor.Float](dsink, do, o, lse, sink array[A]) {
	clear(dsink.data)
	eachHead(o, func(b, i, h int) {
		if z := lse.row(b, i, h)[0]; !math.IsInf(float64(z), -1) {
			p := exp(sink.row(0, 0, h)[0] - z)
			dsink.row(0, 0, h)[0] -= p * dot(do.row(b, i, h), o.row(b, i, h))
		}
	})
}

func eachHead[A tensor.Float](x array[A], visit func(b, i, h int)) {
	for b := range x.shape[tensor.Batch] {
		for i := range x.shape[tensor.Seq] {
			for h := range x.shape[tensor.Heads] {
				visit(b, i, h)
			}
		}
	}
}

func logAddExp[A tensor.Float](a, b A) A {
	m := max(a, b)
	if math.IsInf(float64(m), 0) {
		return m
	}
	return m + A(math.Log1p(math.Exp(float64(min(a, b)-m))))
}

var _ Sinks = (*Reference[float32])(nil)
