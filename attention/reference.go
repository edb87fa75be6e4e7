package attention

import (
	"math"
	"slices"

	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// Reference is the definition of attention: what it computes, every Kernel must. It loops
// over queries and their visible keys, with no blocks and no tricks. Inputs of any float
// type are computed with in A: float64 for the definition itself, float32 to learn what
// error that arithmetic brings.
type Reference[A tensor.Float] struct {
	queue func(name string, run func() error)
}

// NewReference is a reference kernel whose work is given to queue, which runs it in order,
// like tensor.HostStream's Do; nil runs it at once.
func NewReference[A tensor.Float](queue func(name string, run func() error)) *Reference[A] {
	return &Reference[A]{queue: queue}
}

func (r *Reference[A]) do(name string, run func()) error {
	if r.queue == nil {
		run()
		return nil
	}
	r.queue(name, func() error { run(); return nil })
	return nil
}

// Forward folds the block into acc. The old state counts as one more key, whose score is
// its LSE and whose value is its O.
func (r *Reference[A]) Forward(acc Partial, q, k, v View, tiles []partition.Tile, p Softmax) error {
	if err := CheckForward(acc, q, k, v, tiles, p); err != nil {
		return err
	}
	tiles = slices.Clone(tiles)
	return r.do("attention forward", func() {
		o, lse := load[A](acc.O), load[A](acc.LSE)
		forward(o, lse, load[A](q), load[A](k), load[A](v), visible(tiles), p)
		o.store(acc.O)
		lse.store(acc.LSE)
	})
}

// Finish sets o to acc.O.
func (r *Reference[A]) Finish(o View, acc Partial) error {
	if o == acc.O {
		return nil
	}
	if err := CheckFinish(o, acc); err != nil {
		return err
	}
	return r.do("attention finish", func() { load[A](acc.O).store(o) })
}

// FinishGrads has nothing to do: gradients are added at once.
func (r *Reference[A]) FinishGrads(Grads) error { return nil }

// Delta sets delta to rowsum(do * o).
func (r *Reference[A]) Delta(delta, do, o View) error {
	if err := CheckDelta(delta, do, o); err != nil {
		return err
	}
	return r.do("attention delta", func() {
		d := load[A](delta)
		rowDot(d, load[A](do), load[A](o))
		d.store(delta)
	})
}

// Backward adds the gradients of the block to acc.
func (r *Reference[A]) Backward(acc Grads, do, q, k, v View, s Saved, tiles []partition.Tile, p Softmax) error {
	if err := CheckBackward(acc, do, q, k, v, s, tiles, p); err != nil {
		return err
	}
	tiles = slices.Clone(tiles)
	return r.do("attention backward", func() {
		dq, dk, dv := load[A](acc.DQ), load[A](acc.DK), load[A](acc.DV)
		backward(dq, dk, dv, load[A](do), load[A](q), load[A](k), load[A](v), load[A](s.LSE), load[A](s.Delta), visible(tiles), p)
		dq.store(acc.DQ)
		dk.store(acc.DK)
		dv.store(acc.DV)
	})
}

// visible is the predicate that a list of tiles stands for.
func visible(tiles []partition.Tile) func(i, j int) bool {
	return func(i, j int) bool {
		for _, t := range tiles {
			if t.Q.Lo <= i && i < t.Q.Hi && t.K.Lo <= j && j < t.K.Hi && t.Band.Sees(i, j) {
				return true
			}
		}
		return false
	}
}

// forward is FlashAttention-2 (arXiv:2307.08691), section 3.1, with every block one key:
// m = max s, l = sum exp(s - m), O = sum exp(s - m) v / l, LSE = m + ln l.
func forward[A tensor.Float](o, lse, q, k, v array[A], visible func(i, j int) bool, p Softmax) {
	group := q.shape[tensor.Heads] / k.shape[tensor.Heads]
	eachRow(q, k, visible, func(b, i, h int, keys []int) {
		out, old := o.row(b, i, h), &lse.row(b, i, h)[0]
		s, m := make([]A, len(keys)), *old
		for n, j := range keys {
			s[n] = score(dot(q.row(b, i, h), k.row(b, j, h/group)), p)
			m = max(m, s[n])
		}
		if math.IsInf(float64(m), -1) {
			return // no key has any weight, in this block or before it
		}
		l := exp(*old - m)
		scale(l, out)
		for n, j := range keys {
			w := exp(s[n] - m)
			l += w
			axpy(w, v.row(b, j, h/group), out)
		}
		scale(1/l, out)
		*old = m + A(math.Log(float64(l)))
	})
}

// backward is algorithm 2 of the same paper: P = exp(S - LSE), dV += P' dO, dP = dO V',
// dS = P * (dP - D), dQ += dS K, dK += dS' Q.
func backward[A tensor.Float](dq, dk, dv, do, q, k, v, lse, delta array[A], visible func(i, j int) bool, p Softmax) {
	group := q.shape[tensor.Heads] / k.shape[tensor.Heads]
	eachRow(q, k, visible, func(b, i, h int, keys []int) {
		g, z := h/group, lse.row(b, i, h)[0]
		if math.IsInf(float64(z), -1) {
			return
		}
		for _, j := range keys {
			s := score(dot(q.row(b, i, h), k.row(b, j, g)), p)
			w := exp(s - z)
			dp := dot(do.row(b, i, h), v.row(b, j, g))
			ds := w * (dp - delta.row(b, i, h)[0]) * A(p.Scale)
			if p.Softcap > 0 {
				t := s / A(p.Softcap) // tanh' = 1 - tanh^2
				ds *= 1 - t*t
			}
			axpy(w, do.row(b, i, h), dv.row(b, j, g))
			axpy(ds, k.row(b, j, g), dq.row(b, i, h))
			axpy(ds, q.row(b, i, h), dk.row(b, j, g))
		}
	})
}
