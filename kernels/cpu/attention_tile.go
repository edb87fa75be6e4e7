package cpu

import (
	"math"
	"slices"
	"sync"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// log2e = 1/ln 2. Softmax takes scores as base-2 logarithms.
const log2e = 1.4426950408889634

// changed reports whether a bias, a soft cap or the largest scores come between the product and softmax. Scores are
// then natural logarithms and converted to base 2 afterwards. Otherwise the scale of the queries includes log2e.
func changed[T tensor.Float](p attention.Softmax, s *scores[T]) bool {
	return s != nil || p.Softcap > 0
}

// scoreScale returns the factor of the queries.
func scoreScale[T tensor.Float](p attention.Softmax, s *scores[T]) T {
	if changed(p, s) {
		return T(p.Scale)
	}
	return T(p.Scale * log2e)
}

// A scoreTile holds scores: row j belongs to key tile.K.Lo+j, and column i to query first+i. The columns of queries
// outside of tile.Q hold old values or padding.
type scoreTile[T tensor.Float] struct {
	simd.Scores[T]
	tile    partition.Tile
	b, head int
	first   int
}

// seen returns the columns [lo, hi) of row j that see its key.
func (t scoreTile[T]) seen(j int) (lo, hi int) {
	key := t.tile.K.Lo + j
	return max(t.tile.Q.Lo, key-t.tile.Band.Hi) - t.first, min(t.tile.Q.Hi, key-t.tile.Band.Lo+1) - t.first
}

// hide sets the scores of hidden pairs to x.
func hide[T tensor.Float](l simd.Loops[T], t scoreTile[T], x T) {
	b, k, q := t.tile.Band, t.tile.K, t.tile.Q
	lo, hi := k.Lo-b.Hi-t.first, k.Lo-b.Lo-t.first // the band's columns in row 0
	from, to := q.Lo-t.first, q.Hi-t.first
	if lo+t.Keys-1 > from || hi < to-1 {
		l.Band(t.Scores, lo, hi, x)
	}
	if from == 0 && to == t.Cols {
		return
	}
	for j := range t.Keys {
		row := t.S[j*t.Ld:][:t.Cols]
		for i := range from {
			row[i] = x
		}
		for i := to; i < t.Cols; i++ {
			row[i] = x
		}
	}
}

// softcap replaces scores s by c tanh(s/c). It sets slope to the derivative unless slope is nil.
func softcap[T tensor.Float](t simd.Scores[T], slope []T, c float64) {
	for j := range t.Keys {
		for i, x := range t.S[j*t.Ld:][:t.Cols] {
			y := math.Tanh(float64(x) / c)
			t.S[j*t.Ld+i] = T(c * y)
			if slope != nil {
				slope[j*t.Ld+i] = T(1 - y*y)
			}
		}
	}
}

// A cell is a block of queries i and a block of keys j. row and column are the numbers of the previous cells that add
// to the gradients of these queries and of these keys; -1: none.
type cell struct{ i, j, row, column int }

// order returns the visible cells of a grid of nq by nk blocks, round by round.
func (f *backwardCall[T]) order(nq, nk int) []cell {
	n := max(nq, nk)
	last := slices.Repeat([]int{-1}, nq+nk)
	var cells []cell
	for round := range n {
		for i := range nq {
			if j := (round - i + n) % n; j < nk && f.visible(i, j) {
				cells = append(cells, cell{i, j, last[i], last[nq+j]})
				last[i], last[nq+j] = len(cells)-1, len(cells)-1
			}
		}
	}
	return cells
}

// inOrder runs do(cell, 0) to do(cell, per-1) for all cells, each after the cells before it. A cell does not wait for a
// whole round, and the cells that it waits for have already begun.
func inOrder(c *Kernels, cells []cell, per int, do func(s *scratch, c cell, n int)) {
	var mu sync.Mutex
	ended := sync.NewCond(&mu)
	done := make([]bool, len(cells)*per)
	c.split(len(done), func(s *scratch, w int) {
		at, n := cells[w/per], w%per
		ready := func(cell int) bool { return cell < 0 || done[cell*per+n] }
		mu.Lock()
		for !ready(at.row) || !ready(at.column) {
			ended.Wait()
		}
		mu.Unlock()
		do(s, at, n)
		mu.Lock()
		done[w] = true
		mu.Unlock()
		ended.Broadcast()
	})
}

// scores holds the bias of a block's scores, and the largest scores; see attention.Scores. An absent tensor has no
// data.
type scores[T tensor.Float] struct {
	slopes, bias, dbias, max rows[T]
	rows, columns            []int
}

// scoresOf returns nil if s is nil.
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

// shared returns a row of a tensor. All batches or heads share an axis of length 1.
func (r rows[T]) shared(b, s, h int) []T {
	return r.row(min(b, r.view.Len(tensor.Batch)-1), s, min(h, r.view.Len(tensor.Heads)-1))
}

// add adds the slopes and the bias to the scores of a tile.
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

// keep updates the largest score of each query. NaN wins.
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

// grad adds the gradients of scores to the gradient of the bias.
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

// sharesGrad reports whether several batches or heads add to the same gradient of a bias, which only one worker may do.
func (x *scores[T]) sharesGrad(batch, heads int) bool {
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
