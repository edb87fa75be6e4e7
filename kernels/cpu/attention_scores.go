package cpu

import (
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/tensor"
)

// scores is what a block adds to scores and keeps of them; see attention.Scores. A tensor that there is
// not has no data.
type scores[T tensor.Float] struct {
	slopes, bias, dbias, max rows[T]
	rows, columns            []int
}

// scoresOf is nil where nothing is added or kept.
func scoresOf[T tensor.Float](s *attention.Scores, columns []int) *scores[T] {
	if s == nil {
		return nil
	}
	x := &scores[T]{rows: s.Rows, columns: columns}
	for _, r := range []struct {
		from View
		to   *rows[T]
	}{{s.Slopes, &x.slopes}, {s.Bias, &x.bias}, {s.DBias, &x.dbias}, {s.Max, &x.max}} {
		if !r.from.IsZero() {
			*r.to = rowsOf[T](r.from)
		}
	}
	return x
}

// shared is the row of a tensor whose axes of 1 stand for all batches or heads.
func (r rows[T]) shared(b, s, h int) []T {
	return r.row(min(b, r.view.Len(tensor.Batch)-1), s, min(h, r.view.Len(tensor.Heads)-1))
}

// add adds to the scores s of query i and the keys from j on.
func (x *scores[T]) add(s []T, b, i, h, j int) {
	if x == nil {
		return
	}
	columns := x.columns
	if len(columns) > 0 {
		columns = columns[j : j+len(s)]
	}
	if x.slopes.data != nil {
		slope, at := x.slopes.row(0, 0, h)[0], x.rows[i]
		for n, c := range columns {
			s[n] -= slope * T(max(at-c, c-at))
		}
	}
	if x.bias.data != nil {
		bias := x.bias.shared(b, i, h)
		for n, c := range columns {
			s[n] += bias[c]
		}
	}
}

// keep keeps the largest score of a row.
func (x *scores[T]) keep(largest T, b, i, h int) {
	if x != nil && x.max.data != nil {
		m := &x.max.row(b, i, h)[0]
		*m = max(*m, largest)
	}
}

// grad adds the gradients of the scores of query i and the keys from j on to those of their bias.
func (x *scores[T]) grad(ds []T, b, i, h, j int) {
	if x == nil || x.dbias.data == nil {
		return
	}
	grad := x.dbias.shared(b, i, h)
	for n, c := range x.columns[j : j+len(ds)] {
		grad[c] += ds[n]
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

// views are the tensors of s, those that there are.
func views(s *attention.Scores) []View {
	if s == nil {
		return nil
	}
	return slices.DeleteFunc([]View{s.Slopes, s.Bias, s.DBias, s.Max}, func(v View) bool { return v.IsZero() })
}

// begun queues the first values of what a forward pass keeps.
func (c *Kernels) begun(s *attention.Scores) {
	if s != nil && !s.Max.IsZero() {
		c.queue("attention reset", func() { fillAny(s.Max, math.Inf(-1)) })
	}
}
