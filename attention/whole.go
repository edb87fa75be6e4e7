package attention

import (
	"math"
	"slices"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Whole computes attention of a whole sequence on one device, forward and backward, in global order: the oracle for
// everything that cuts sequences up. It asks the mask for each pair, so it does not depend on the tiles of package
// partition. It panics if the mask or the scale is not set. DBias and Max of p.Scores are set. The results are dense
// float64 views; the arithmetic is A's.
func Whole[A tensor.Float](q, k, v, do View, mask partition.Mask, p Softmax) (Partial, Grads) {
	if err := mask.Check(); err != nil {
		panic("attention: " + err.Error())
	}
	if p.unset() {
		panic("attention: Softmax.Scale is not set; it is usually 1/sqrt(head dim)")
	}
	out := outShape(q, v)
	acc := Partial{O: like(out), LSE: like(rowShape(q))}
	grads := Grads{DQ: like(q.Shape()), DK: like(k.Shape()), DV: like(v.Shape())}
	set(acc.LSE, math.Inf(-1))
	sees := masked(mask)
	extra, done := wholeTerms[A](p.Scores, q, k, mask)
	qa, ka, va, doa := load[A](q), load[A](k), load[A](v), load[A](do)
	o, lse := load[A](acc.O), load[A](acc.LSE)
	forward(o, lse, qa, ka, va, sees, p, extra)
	delta := load[A](like(rowShape(q)))
	rowDot(delta, doa, o)
	dq, dk, dv := load[A](grads.DQ), load[A](grads.DK), load[A](grads.DV)
	backward(dq, dk, dv, doa, qa, ka, va, lse, delta, sees, p, extra)
	for _, s := range []struct {
		from array[A]
		to   View
	}{{o, acc.O}, {lse, acc.LSE}, {dq, grads.DQ}, {dk, grads.DK}, {dv, grads.DV}} {
		s.from.store(s.to)
	}
	done()
	return acc, grads
}

// wholeTerms returns the terms of p for keys at their own indices and queries as the mask aligns them, and a function
// that stores the kept results. It ignores Rows of p.
func wholeTerms[A tensor.Float](s *Scores, q, k View, mask partition.Mask) (*terms[A], func()) {
	if s == nil {
		return nil, func() {}
	}
	n, m := q.Len(tensor.Seq), k.Len(tensor.Seq)
	shape := partition.Shape{SeqQ: n, SeqKV: m, Mask: mask}
	whole := *s
	whole.Rows = make([]int, n)
	for i := range whole.Rows {
		whole.Rows[i] = shape.Aligned(i)
	}
	columns := make([]int, m)
	for j := range columns {
		columns[j] = j
	}
	var kept [2]func()
	extra := termsOf[A](&whole, columns)
	for i, x := range []struct {
		v    View
		to   **array[A]
		none float64
	}{{s.Max, &extra.max, math.Inf(-1)}, {s.DBias, &extra.dbias, 0}} {
		if !x.v.IsZero() {
			set(x.v, x.none)
		}
		*x.to, kept[i] = held[A](x.v)
	}
	return extra, func() { kept[0](); kept[1]() }
}

// masked returns the predicate of a mask: the band inside one document, or its slices.
func masked(m partition.Mask) func(i, j int) bool {
	if len(m.Slices) > 0 {
		return visible(m.Slices)
	}
	var doc []int // the document of each position
	for d, n := range m.Docs {
		doc = append(doc, slices.Repeat([]int{d}, n)...)
	}
	return func(i, j int) bool {
		return m.Sees(i, j) && (len(doc) == 0 || doc[i] == doc[j])
	}
}

func like(shape [4]int) View { return tensor.New(tensor.F64, shape[:]...) }
