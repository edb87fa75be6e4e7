package kernels

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// Forward folds the attention of q over one block of keys into acc; see attention.Kernel.
func (c *CPU) Forward(acc attention.Partial, q, k, v View, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckForward(acc, q, k, v, tiles, p); err != nil {
		return err
	}
	if err := computable("attention forward", q, k, v, acc.O, acc.LSE); err != nil {
		return err
	}
	tiles = slices.Clone(tiles)
	c.stream.Do("attention forward", func() error {
		if q.DType() == tensor.F64 {
			forward[float64](c, acc, q, k, v, tiles, p)
		} else {
			forward[float32](c, acc, q, k, v, tiles, p)
		}
		return nil
	})
	return nil
}

// Finish sets o to acc.O; see attention.Kernel.
func (c *CPU) Finish(o View, acc attention.Partial) error {
	if o == acc.O {
		return nil
	}
	if err := attention.CheckFinish(o, acc); err != nil {
		return err
	}
	if err := computable("attention finish", o, acc.O); err != nil {
		return err
	}
	c.stream.Do("attention finish", func() error { tensor.Copy(o, acc.O); return nil })
	return nil
}

// FinishGrads has nothing to do: gradients are added at once.
func (c *CPU) FinishGrads(attention.Grads) error { return nil }

// Delta sets delta to rowsum(do * o); see attention.Kernel.
func (c *CPU) Delta(delta, do, o View) error {
	if err := attention.CheckDelta(delta, do, o); err != nil {
		return err
	}
	if err := computable("attention delta", o, do, delta); err != nil {
		return err
	}
	c.stream.Do("attention delta", func() error {
		if o.DType() == tensor.F64 {
			rowDots[float64](c, delta, do, o)
		} else {
			rowDots[float32](c, delta, do, o)
		}
		return nil
	})
	return nil
}

// Backward adds the gradients of one block of keys to acc; see attention.Kernel.
func (c *CPU) Backward(acc attention.Grads, do, q, k, v View, s attention.Saved, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckBackward(acc, do, q, k, v, s, tiles, p); err != nil {
		return err
	}
	if err := computable("attention backward", q, k, v, do, s.LSE, s.Delta, acc.DQ, acc.DK, acc.DV); err != nil {
		return err
	}
	tiles = slices.Clone(tiles)
	c.stream.Do("attention backward", func() error {
		if q.DType() == tensor.F64 {
			backward[float64](c, acc, do, q, k, v, s.LSE, s.Delta, tiles, p)
		} else {
			backward[float32](c, acc, do, q, k, v, s.LSE, s.Delta, tiles, p)
		}
		return nil
	})
	return nil
}

var _ attention.Kernel = (*CPU)(nil)

// computable is an error where the views do not all lie in this process with one of the
// types that the CPU computes in.
func computable(what string, vs ...View) error {
	if err := onHost(what, vs...); err != nil {
		return err
	}
	for _, v := range vs {
		if t := v.DType(); t != vs[0].DType() || t != tensor.F32 && t != tensor.F64 {
			return fmt.Errorf("%s: element types %v and %v; the CPU computes in float32 or float64 throughout",
				what, vs[0].DType(), t)
		}
	}
	return nil
}

func rowDots[T tensor.Float](c *CPU, delta, do, o View) {
	d, x, y := rowsOf[T](delta), rowsOf[T](do), rowsOf[T](o)
	seq := o.Len(tensor.Seq)
	c.each(o.Rows(), func(row int) {
		b, s := row/seq, row%seq
		for h := range o.Len(tensor.Heads) {
			sum := 0.0
			yr := y.row(b, s, h)
			for i, a := range x.row(b, s, h) {
				sum += float64(a) * float64(yr[i])
			}
			d.row(b, s, h)[0] = T(sum)
		}
	})
}

// clip is the part of t inside a block of queries and a block of keys, shrunk to the
// bounding box of its visible pairs. ok is false where there are none.
func clip(t partition.Tile, q, k partition.Range) (_ partition.Tile, ok bool) {
	t.Q = meet(meet(t.Q, q), partition.Range{Lo: max(t.K.Lo, k.Lo) - t.Band.Hi, Hi: min(t.K.Hi, k.Hi) - t.Band.Lo})
	t.K = meet(meet(t.K, k), partition.Range{Lo: t.Q.Lo + t.Band.Lo, Hi: t.Q.Hi + t.Band.Hi})
	return t, t.Q.Lo < t.Q.Hi && t.K.Lo < t.K.Hi && t.Band.Lo <= t.Band.Hi
}

func meet(a, b partition.Range) partition.Range {
	return partition.Range{Lo: max(a.Lo, b.Lo), Hi: min(a.Hi, b.Hi)}
}

// block is the n-th piece of [0, length) in pieces of size.
func block(n, size, length int) partition.Range {
	return partition.Range{Lo: n * size, Hi: min((n+1)*size, length)}
}

func blocks(length, size int) int { return (length + size - 1) / size }

// columns is the part [lo, hi) of a row of n scores, of keys from j0 on, that query i sees;
// lo >= hi where it sees none. In a block that is wholly visible it is [0, n) for every row.
func columns(b partition.Band, i, j0, n int) (lo, hi int) {
	return max(0, i+b.Lo-j0), min(n, i+b.Hi+1-j0)
}
