package cpu

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Forward begins a forward pass; see attention.Kernel.
func (c *Kernels) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	if err := attention.CheckForward(o, acc, q, p); err != nil {
		return nil, err
	}
	if err := computable("attention forward", append([]View{q, o, acc.O, acc.LSE}, views(p.Scores)...)...); err != nil {
		return nil, err
	}
	c.stream.Do("attention reset", func() error {
		fillAny(acc.O, 0)
		fillAny(acc.LSE, math.Inf(-1))
		return nil
	})
	c.begun(p.Scores)
	c.forward = forwardPass{c, o, acc, q, p}
	return &c.forward, nil
}

// A forwardPass is a forward pass. What it queues has copies, so that the next pass can use its
// memory.
type forwardPass struct {
	c   *Kernels
	o   View
	acc attention.Partial
	q   View
	p   attention.Softmax
}

// Block folds a block of keys into the accumulator.
func (f *forwardPass) Block(b attention.Block) error {
	if err := attention.CheckBlock(f.acc.O, f.q, b, f.p); err != nil {
		return err
	}
	if err := computable("attention forward", f.q, b.K, b.V); err != nil {
		return err
	}
	x := *f
	b.Tiles, b.Columns = slices.Clone(b.Tiles), slices.Clone(b.Columns)
	x.c.stream.Do("attention forward", func() error {
		if x.q.DType() == tensor.F64 {
			forward[float64](&x, b)
		} else {
			forward[float32](&x, b)
		}
		return nil
	})
	return nil
}

// End sets o to the accumulator.
func (f *forwardPass) End() error {
	o, acc := f.o, f.acc.O
	if o != acc {
		f.c.Copy(o, acc)
	}
	return nil
}

// Backward begins a backward pass; see attention.Kernel.
func (c *Kernels) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	if err := attention.CheckBackward(dq, do, q, s, p); err != nil {
		return nil, err
	}
	if err := computable("attention backward", append([]View{q, do, s.O, s.LSE, s.Delta, dq},
		views(p.Scores)...)...); err != nil {
		return nil, err
	}
	c.Zero(dq)
	if p.Scores != nil && !p.Scores.DBias.IsZero() {
		c.Zero(p.Scores.DBias)
	}
	c.stream.Do("attention delta", func() error {
		if q.DType() == tensor.F64 {
			rowDots[float64](c, s.Delta, do, s.O)
		} else {
			rowDots[float32](c, s.Delta, do, s.O)
		}
		return nil
	})
	c.backward = backwardPass{c, dq, do, q, s, p}
	return &c.backward, nil
}

// A backwardPass is a backward pass.
type backwardPass struct {
	c         *Kernels
	dq, do, q View
	s         attention.Saved
	p         attention.Softmax
}

// Block adds the gradients of a block.
func (f *backwardPass) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	if err := computable("attention backward", f.q, b.K, b.V, b.DK, b.DV); err != nil {
		return err
	}
	fresh := b.KeyGrads.Rows(b.Fresh.Lo, b.Fresh.Hi)
	f.c.Zero(fresh.DK, fresh.DV)
	if len(b.Tiles) == 0 {
		return nil
	}
	x := *f
	b.Tiles, b.Columns = slices.Clone(b.Tiles), slices.Clone(b.Columns)
	x.c.stream.Do("attention backward", func() error {
		if x.q.DType() == tensor.F64 {
			backward[float64](&x, b)
		} else {
			backward[float32](&x, b)
		}
		return nil
	})
	return nil
}

// End has nothing to do: gradients are added at once.
func (f *backwardPass) End() error { return nil }

// Fold adds gradients of keys from elsewhere.
func (f *backwardPass) Fold(x attention.Fold) error {
	if err := attention.CheckFold(x); err != nil {
		return err
	}
	dst := x.Dst.Rows(x.Lo, x.Lo+x.Src.DK.Len(tensor.Seq))
	if err := computable("attention fold", dst.DK, x.Src.DK, dst.DV, x.Src.DV); err != nil {
		return err
	}
	f.c.Add(dst.DK, x.Src.DK)
	f.c.Add(dst.DV, x.Src.DV)
	return nil
}

var _ attention.Kernel = (*Kernels)(nil)

// computable returns an error where the views do not all lie in this process with types that the CPU computes with each
// other: float64 with itself, and float32 with itself and with 16 bits.
func computable(what string, vs ...View) error {
	if err := onHost(what, vs...); err != nil {
		return err
	}
	for _, v := range vs {
		if t := v.DType(); (t == tensor.F64) != (vs[0].DType() == tensor.F64) || t != tensor.F64 && t != tensor.F32 &&
			!isHalf(t) {
			return fmt.Errorf("%s: element types %v and %v; the CPU computes float64 with float64 alone, and "+
				"float32, bfloat16 and float16 with each other",
				what, vs[0].DType(), t)
		}
	}
	return nil
}

func rowDots[T tensor.Float](c *Kernels, delta, do, o View) {
	d, x, y := rowsOf[T](delta), rowsOf[T](do), rowsOf[T](o)
	seq, heads, l := o.Len(tensor.Seq), o.Len(tensor.Heads), simd.LoopsOf[T](c.level)
	size := rowBlock(heads * x.dim)
	c.split(blocks(o.Rows(), size), func(s *scratch, n int) {
		mem := open[T](s, x.room(1), y.room(1))
		xs, ys := mem.take(x.room(1)), mem.take(y.room(1))
		for row := n * size; row < min((n+1)*size, o.Rows()); row++ {
			b, i := row/seq, row%seq
			for h := range heads {
				d.row(b, i, h)[0] = T(l.Dot(x.read(xs, b, i, h), y.read(ys, b, i, h)))
			}
		}
	})
}

// clip returns the part of t inside a block of queries and a block of keys, shrunk to the
// bounding box of its visible pairs. ok is false if there are none.
func clip(t partition.Tile, q, k partition.Range) (_ partition.Tile, ok bool) {
	t.Q = meet(meet(t.Q, q), partition.Range{Lo: max(t.K.Lo, k.Lo) - t.Band.Hi, Hi: min(t.K.Hi, k.Hi) - t.Band.Lo})
	t.K = meet(meet(t.K, k), partition.Range{Lo: t.Q.Lo + t.Band.Lo, Hi: t.Q.Hi + t.Band.Hi})
	return t, t.Q.Lo < t.Q.Hi && t.K.Lo < t.K.Hi && t.Band.Lo <= t.Band.Hi
}

func meet(a, b partition.Range) partition.Range {
	return partition.Range{Lo: max(a.Lo, b.Lo), Hi: min(a.Hi, b.Hi)}
}

// block returns the n-th piece of [0, length) in pieces of size.
func block(n, size, length int) partition.Range {
	return partition.Range{Lo: n * size, Hi: min((n+1)*size, length)}
}

func blocks(length, size int) int { return (length + size - 1) / size }
