package attention

import (
	"math"
	"slices"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Reference defines attention: every Kernel must compute the same. It loops over
// queries and their visible keys, with no blocks and no tricks. It converts inputs of any float
// type to A and computes in A: float64 for the definition itself, float32 to learn the error of
// that arithmetic.
type Reference[A tensor.Float] struct {
	queue func(name string, run func() error)
}

// NewReference returns a reference kernel that gives its work to queue, which runs it in order,
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

// Forward begins a forward pass; see Kernel.
func (r *Reference[A]) Forward(o View, acc Partial, q View, p Softmax) (ForwardPass, error) {
	if err := CheckForward(o, acc, q, p); err != nil {
		return nil, err
	}
	return &referenceForward[A]{r, o, acc, q, p}, r.do("attention reset", func() {
		set(acc.O, 0)
		set(acc.LSE, math.Inf(-1))
		if p.Scores != nil && !p.Scores.Max.IsZero() {
			set(p.Scores.Max, math.Inf(-1))
		}
	})
}

type referenceForward[A tensor.Float] struct {
	r   *Reference[A]
	o   View
	acc Partial
	q   View
	p   Softmax
}

// Block folds a block into acc. The old state counts as one more key: its score is the old LSE,
// its value the old O.
func (f *referenceForward[A]) Block(b Block) error {
	if err := CheckBlock(f.acc.O, f.q, b, f.p); err != nil {
		return err
	}
	tiles, acc, columns := slices.Clone(b.Tiles), f.acc, slices.Clone(b.Columns)
	return f.r.do("attention forward", func() {
		o, lse := load[A](acc.O), load[A](acc.LSE)
		extra, done := termsOf[A](f.p.Scores, columns), func() {}
		if extra != nil {
			extra.max, done = held[A](f.p.Scores.Max)
		}
		forward(o, lse, load[A](f.q), load[A](b.K), load[A](b.V), visible(tiles), f.p, extra)
		done()
		o.store(acc.O)
		lse.store(acc.LSE)
	})
}

// End sets o to acc.O.
func (f *referenceForward[A]) End() error {
	if f.o == f.acc.O {
		return nil
	}
	return f.r.do("attention finish", func() { load[A](f.acc.O).store(f.o) })
}

// Backward begins a backward pass; see Kernel.
func (r *Reference[A]) Backward(dq, do, q View, s Saved, p Softmax) (BackwardPass, error) {
	if err := CheckBackward(dq, do, q, s, p); err != nil {
		return nil, err
	}
	return &referenceBackward[A]{r, dq, do, q, s, p}, r.do("attention delta", func() {
		set(dq, 0)
		if p.Scores != nil && !p.Scores.DBias.IsZero() {
			set(p.Scores.DBias, 0)
		}
		d := load[A](s.Delta)
		rowDot(d, load[A](do), load[A](s.O))
		d.store(s.Delta)
	})
}

type referenceBackward[A tensor.Float] struct {
	r         *Reference[A]
	dq, do, q View
	s         Saved
	p         Softmax
}

// Block adds the gradients of a block.
func (f *referenceBackward[A]) Block(b GradBlock) error {
	if err := CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	tiles, columns, fresh := slices.Clone(b.Tiles), slices.Clone(b.Columns), b.KeyGrads.Rows(b.Fresh.Lo, b.Fresh.Hi)
	return f.r.do("attention backward", func() {
		set(fresh.DK, 0)
		set(fresh.DV, 0)
		dq, dk, dv := load[A](f.dq), load[A](b.DK), load[A](b.DV)
		extra, done := termsOf[A](f.p.Scores, columns), func() {}
		if extra != nil {
			extra.dbias, done = held[A](f.p.Scores.DBias)
		}
		backward(dq, dk, dv, load[A](f.do), load[A](f.q), load[A](b.K), load[A](b.V), load[A](f.s.LSE),
			load[A](f.s.Delta), visible(tiles), f.p, extra)
		done()
		dq.store(f.dq)
		dk.store(b.DK)
		dv.store(b.DV)
	})
}

// End does nothing: Block adds gradients at once.
func (f *referenceBackward[A]) End() error { return nil }

// Fold adds src to rows of dst.
func (f *referenceBackward[A]) Fold(x Fold) error {
	if err := CheckFold(x); err != nil {
		return err
	}
	return f.r.do("add", func() {
		dst := x.Dst.Rows(x.Lo, x.Lo+x.Src.DK.Len(tensor.Seq))
		add[A](dst.DK, x.Src.DK)
		add[A](dst.DV, x.Src.DV)
	})
}

// visible returns the predicate of a list of tiles.
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

// forward computes FlashAttention-2 (arXiv:2307.08691), section 3.1, with every block one key:
// m = max s, l = sum exp(s - m), O = sum exp(s - m) v / l, LSE = m + ln l.
func forward[A tensor.Float](o, lse, q, k, v array[A], visible func(i, j int) bool, p Softmax, extra *terms[A]) {
	group := q.shape[tensor.Heads] / k.shape[tensor.Heads]
	eachRow(q, k, visible, func(b, i, h int, keys []int) {
		out, old := o.row(b, i, h), &lse.row(b, i, h)[0]
		s, m := make([]A, len(keys)), *old
		for n, j := range keys {
			s[n] = extra.add(score(dot(q.row(b, i, h), k.row(b, j, h/group)), p), b, i, h, j)
			extra.keep(s[n], b, i, h)
			m = max(m, s[n])
		}
		if math.IsInf(float64(m), -1) { // no key has any weight, in this block or before it
			if len(keys) > 0 && !p.Scores.Hides() {
				*old = A(math.NaN())
				scale(*old, out)
			}
			return
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

// backward computes algorithm 2 of the same paper: P = exp(S - LSE), dV += P' dO, dP = dO V',
// dS = P * (dP - D), dQ += dS K, dK += dS' Q.
func backward[A tensor.Float](dq, dk, dv, do, q, k, v, lse, delta array[A], visible func(i, j int) bool, p Softmax,
	extra *terms[A]) {
	group := q.shape[tensor.Heads] / k.shape[tensor.Heads]
	eachRow(q, k, visible, func(b, i, h int, keys []int) {
		g, z := h/group, lse.row(b, i, h)[0]
		if math.IsInf(float64(z), -1) {
			return
		}
		for _, j := range keys {
			s := score(dot(q.row(b, i, h), k.row(b, j, g)), p)
			w := exp(extra.add(s, b, i, h, j) - z)
			dp := dot(do.row(b, i, h), v.row(b, j, g))
			ds := w * (dp - delta.row(b, i, h)[0])
			extra.grad(ds, b, i, h, j)
			ds *= A(p.Scale)
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
