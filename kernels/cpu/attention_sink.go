package cpu

import (
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/tensor"
)

// FoldSink folds sinks into attention; see attention.Sinks.
func (c *Kernels) FoldSink(o, lse, sink tensor.View) error {
	if err := attention.CheckFoldSink(o, lse, sink); err != nil {
		return err
	}
	if err := computable("attention sink", o, lse, sink); err != nil {
		return err
	}
	c.queue("attention sink", func() {
		if lse.DType() == tensor.F64 {
			foldSink[float64](c, o, lse, sink)
		} else {
			foldSink[float32](c, o, lse, sink)
		}
	})
	return nil
}

// SinkGrad sets dsink to the gradient of the sinks; see attention.Sinks.
func (c *Kernels) SinkGrad(dsink, do, o, lse, sink tensor.View) error {
	if err := attention.CheckSinkGrad(dsink, do, o, lse, sink); err != nil {
		return err
	}
	if err := computable("attention sink gradient", o, do, lse, sink, dsink); err != nil {
		return err
	}
	c.queue("attention sink gradient", func() {
		if lse.DType() == tensor.F64 {
			sinkGrad[float64](c, dsink, do, o, lse, sink)
		} else {
			sinkGrad[float32](c, dsink, do, o, lse, sink)
		}
	})
	return nil
}

var _ attention.Sinks = (*Kernels)(nil)

func foldSink[T tensor.Float](c *Kernels, o, lse, sink tensor.View) {
	out, z, s := rowsOf[T](o), rowsOf[T](lse), rowsOf[T](sink)
	seq := max(o.Len(tensor.Seq), 1)
	c.split(o.Rows(), func(mem *scratch, row int) {
		b, i := row/seq, row%seq
		buf := open[T](mem, out.room(1)).free
		for h := range o.Len(tensor.Heads) {
			old := &z.row(b, i, h)[0]
			with := logAddExp(float64(*old), float64(s.row(0, 0, h)[0]))
			if math.IsInf(with, -1) {
				continue // neither a key nor the sink has any weight
			}
			shrink := T(math.Exp(float64(*old) - with))
			y := out.read(buf, b, i, h)
			for d := range y {
				y[d] *= shrink
			}
			out.write(b, i, h, y)
			*old = T(with)
		}
	})
}

// sinkGrad adds up a head's rows in order, one head a worker, so that the sum is the same bits.
func sinkGrad[T tensor.Float](c *Kernels, dsink, do, o, lse, sink tensor.View) {
	grad, dy, y, z, s := rowsOf[T](dsink), rowsOf[T](do), rowsOf[T](o), rowsOf[T](lse), rowsOf[T](sink)
	c.split(o.Len(tensor.Heads), func(mem *scratch, h int) {
		room := open[T](mem, dy.room(1), y.room(1))
		dys, ys := room.take(dy.room(1)), room.take(y.room(1))
		at, total := float64(s.row(0, 0, h)[0]), 0.0
		for b := range o.Len(tensor.Batch) {
			for i := range o.Len(tensor.Seq) {
				lse := float64(z.row(b, i, h)[0])
				if math.IsInf(lse, -1) {
					continue
				}
				sum, x := 0.0, y.read(ys, b, i, h)
				for d, g := range dy.read(dys, b, i, h) {
					sum += float64(g) * float64(x[d])
				}
				total -= math.Exp(at-lse) * sum
			}
		}
		grad.row(0, 0, h)[0] = T(total)
	})
}

// logAddExp returns the logarithm of exp(a) + exp(b).
func logAddExp(a, b float64) float64 {
	m := max(a, b)
	if math.IsInf(m, 0) {
		return m
	}
	return m + math.Log1p(math.Exp(min(a, b)-m))
}
