package cpu

import (
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/tensor"
)

// A scores holds the terms that a block adds to scores, and the largest score; see attention.Scores. An absent tensor
// has no data.
type scores[T tensor.Float] struct {
	slopes, bias, dbias, max rows[T]
	rows, columns            []int
}

// scoresOf returns nil if the block adds and keeps nothing.
func scoresOf[T tensor.Float](s *attention.Scores, columns []int) *scores[T] {
	if s == nil {
		return nil
	}
	x := &scores[T]{rows: s.Rows, columns: columns}
	for _, r := range []struct {
		from tensor.View
		to   *rows[T]
	}{{s.Slopes, &x.slopes}, {s.Bias, &x.bias}, {s.DBias, &x.dbias}, {s.Max, &x.max}} {
		if !r.from.IsZero() {
			*r.to = rowsOf[T](r.from)
		}
	}
	return x
}

// shared returns a row of a tensor; all batches or heads share an axis of 1.
func (r rows[T]) shared(b, s, h int) []T {
	return r.row(min(b, r.view.Len(tensor.Batch)-1), s, min(h, r.view.Len(tensor.Heads)-1))
}

// add adds to the scores of a tile.
func (x *scores[T]) add(t scoreTile[T]) {
	if x == nil {
		return
	}
	for j := range t.Keys {
		column, lo, hi := 0, 0, 0
		if lo, hi = t.seen(j); lo >= hi {
			continue
		}
		if len(x.columns) > 0 {
			column = x.columns[t.tile.K.Lo+j]
		}
		s := t.S[j*t.Ld:][:hi]
		if x.slopes.data != nil {
			slope := x.slopes.row(0, 0, t.head)[0]
			for i := lo; i < hi; i++ {
				at := x.rows[t.first+i]
				s[i] -= slope * T(max(at-column, column-at))
			}
		}
		if x.bias.data != nil {
			for i := lo; i < hi; i++ {
				s[i] += x.bias.shared(t.b, t.first+i, t.head)[column]
			}
		}
	}
}

// keep keeps the largest score of each query, or NaN.
func (x *scores[T]) keep(t scoreTile[T]) {
	if x == nil || x.max.data == nil {
		return
	}
	for j := range t.Keys {
		lo, hi := t.seen(j)
		for i := lo; i < hi; i++ {
			if m, s := &x.max.row(t.b, t.first+i, t.head)[0], t.S[j*t.Ld+i]; s > *m || s != s {
				*m = s
			}
		}
	}
}

// grad adds the gradients of scores to the gradient of their bias.
func (x *scores[T]) grad(t scoreTile[T]) {
	if x == nil || x.dbias.data == nil {
		return
	}
	for j := range t.Keys {
		lo, hi := t.seen(j)
		for i := lo; i < hi; i++ {
			x.dbias.shared(t.b, t.first+i, t.head)[x.columns[t.tile.K.Lo+j]] += t.S[j*t.Ld+i]
		}
	}
}

// alone reports whether several batches or heads add to one gradient of a bias, so that only one
// worker may.
func (x *scores[T]) alone(batch, heads int) bool {
	if x == nil || x.dbias.data == nil {
		return false
	}
	return x.dbias.view.Len(tensor.Batch) < batch || x.dbias.view.Len(tensor.Heads) < heads
}

// views lists the tensors of s, without absent ones.
func views(s *attention.Scores) []tensor.View {
	if s == nil {
		return nil
	}
	return slices.DeleteFunc([]tensor.View{s.Slopes, s.Bias, s.DBias, s.Max}, tensor.View.IsZero)
}

// begun queues the first values of the largest scores.
func (c *Kernels) begun(s *attention.Scores) {
	if s != nil && !s.Max.IsZero() {
		c.queue("attention reset", func() { fillAny(s.Max, math.Inf(-1)) })
	}
}
