package attention

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/tensor"
)

// Scores lists the terms that a pass adds to scores beside Softmax's scale and soft cap. The zero value of a field
// leaves it out. A pass adds terms after the scale and the soft cap:
//
//	s = cap(Scale q.k) - Slopes[h] |Rows[i] - Columns[j]| + Bias[b, i, h, Columns[j]]
//
// Tiles are in local indices, without the position of a query or a key. So Rows and
// Block.Columns say it: any layout, and any keys that are gathered in one block, have a list.
type Scores struct {
	// Slopes [1, 1, heads, 1] are ALiBi's (Press et al., arXiv:2108.12409).
	Slopes View
	// Bias [1 or batch, seqQ, 1 or heads, columns] has a row for each local query and a column for each
	// key of the whole sequence. All batches or heads share an axis of 1.
	Bias View
	// DBias is like Bias. A backward pass sets it to the gradient of Bias, 0 for pairs that no query of
	// the rank sees.
	DBias View
	// Max [batch, seqQ, heads, 1] is set by a forward pass to the largest score that each row sees, -Inf
	// if it sees none. A sink is no score.
	Max View
	// Rows gives each query its position among the keys: the position of the last key under a causal mask.
	// It may be nil without Slopes.
	Rows []int
}

// Positions reports whether blocks of the pass need Columns.
func (s *Scores) Positions() bool { return s != nil && !(s.Slopes.IsZero() && s.Bias.IsZero()) }

// Hides reports whether scores of -Inf are a mask of the caller's: only a bias hides pairs that tiles show.
func (s *Scores) Hides() bool { return s != nil && !s.Bias.IsZero() }

// Plain returns an error where p asks for more than scale and soft cap. Kernels that have no more call it.
func (p Softmax) Plain(what string) error {
	if p.Scores == nil {
		return nil
	}
	return fmt.Errorf("%s: these kernels add nothing to scores and return no largest one; use the reference backend",
		what)
}

// scores finds faults of the Scores of a pass, forward or backward.
func (c *checker) scores(q View, s *Scores, backward bool) {
	if s == nil {
		return
	}
	t, n := AccumulatorType(q.DType()), q.Shape()
	if !s.Slopes.IsZero() {
		c.view("slopes", s.Slopes, t, [4]int{1, 1, n[2], 1})
		if len(s.Rows) != n[1] {
			c.fault("%d rows for %d queries", len(s.Rows), n[1])
		}
	}
	if b := s.Bias; !b.IsZero() {
		want := [4]int{n[0], n[1], n[2], b.Len(tensor.Dim)}
		for _, a := range []tensor.Axis{tensor.Batch, tensor.Heads} {
			if b.Len(a) == 1 {
				want[a] = 1
			}
		}
		c.view("bias", b, t, want)
		if backward && !s.DBias.IsZero() {
			c.view("dbias", s.DBias, t, want)
		}
	} else if !s.DBias.IsZero() {
		c.fault("dbias without a bias")
	}
	if !backward && !s.Max.IsZero() {
		c.view("the largest scores", s.Max, t, rowShape(q))
	}
}

func (c *checker) columns(k View, b Block, s *Scores) {
	if !s.Positions() || len(b.Tiles) == 0 {
		return
	}
	if n := k.Len(tensor.Seq); len(b.Columns) < n {
		c.fault("%d columns for %d keys", len(b.Columns), n)
		return
	}
	if s.Bias.IsZero() {
		return
	}
	for _, j := range b.Columns {
		if j < 0 || j >= s.Bias.Len(tensor.Dim) {
			c.fault("column %d outside a bias of %d", j, s.Bias.Len(tensor.Dim))
			return
		}
	}
}

// A terms holds the tensors that a pass of the reference adds to scores.
type terms[A tensor.Float] struct {
	slopes, bias  array[A]
	rows, columns []int
	max, dbias    *array[A]
}

// termsOf returns nil if the pass adds and keeps nothing.
func termsOf[A tensor.Float](s *Scores, columns []int) *terms[A] {
	if s == nil {
		return nil
	}
	t := &terms[A]{rows: s.Rows, columns: columns}
	for _, x := range []struct {
		from View
		to   *array[A]
	}{{s.Slopes, &t.slopes}, {s.Bias, &t.bias}} {
		if !x.from.IsZero() {
			*x.to = load[A](x.from)
		}
	}
	return t
}

// shared returns a row of a tensor; all batches or heads share an axis of 1.
func (a array[A]) shared(b, i, h int) []A {
	return a.row(min(b, a.shape[tensor.Batch]-1), i, min(h, a.shape[tensor.Heads]-1))
}

func (t *terms[A]) add(s A, b, i, h, j int) A {
	if t == nil {
		return s
	}
	if t.slopes.data != nil {
		s -= t.slopes.row(0, 0, h)[0] * A(math.Abs(float64(t.rows[i]-t.columns[j])))
	}
	if t.bias.data != nil {
		s += t.bias.shared(b, i, h)[t.columns[j]]
	}
	return s
}

func (t *terms[A]) keep(s A, b, i, h int) {
	if t != nil && t.max != nil {
		m := &t.max.row(b, i, h)[0]
		*m = max(*m, s)
	}
}

// grad adds the gradient of a score to the gradient of its bias.
func (t *terms[A]) grad(ds A, b, i, h, j int) {
	if t != nil && t.dbias != nil {
		t.dbias.shared(b, i, h)[t.columns[j]] += ds
	}
}

// held loads v, unless it is zero, and returns a function that stores it.
func held[A tensor.Float](v View) (*array[A], func()) {
	if v.IsZero() {
		return nil, func() {}
	}
	a := load[A](v)
	return &a, func() { a.store(v) }
}
