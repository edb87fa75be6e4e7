package delta

import (
	"math"
	"slices"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/tensor"
)

// Reference defines the rule: in float64, it follows the recurrence row by row, forward and in reverse. It computes at
// once, in host memory.
type Reference struct{}

// A head is a segment of one sample and value head. The state of a map's head is M | R, that of others has no M.
type head struct {
	b, batch, n, h         int // sample, number of samples, index of the map, value head of all heads
	segment                Segment
	heads                  int
	scale                  float64
	q, k, v, g, beta       []float64
	dim, dimV, front, cols int         // rows of the state, columns of V and of M, and all columns
	decayed, u             [][]float64 // of each row: the state after its decay, and u
}

// Summarize sets Maps; see Kernel.
func (Reference) Summarize(a Args) error {
	return each("delta summarize", a, a.Q.Len(tensor.Dim), func(x *head) {
		s := x.identity()
		x.forward(s)
		near.Encode(x.state(a.Maps, x.n), s)
	})
}

// Forward sets O; see Kernel.
func (Reference) Forward(a Args) error {
	return each("delta forward", a, 0, func(x *head) {
		near.Encode(x.rows(a.O), x.forward(x.given(a.State, a.Entered)))
	})
}

// SummarizeBackward sets DMaps; see Kernel.
func (Reference) SummarizeBackward(a Args) error {
	return each("delta summarize backward", a, a.Q.Len(tensor.Dim), func(x *head) {
		x.forward(make([]float64, x.dim*x.cols)) // the gradient of a state does not depend on the state
		ds := x.identity()
		x.backward(near.Decode(x.rows(a.DO)), ds)
		near.Encode(x.state(a.DMaps, x.n), ds)
	})
}

// Backward sets the gradients; see Kernel.
func (Reference) Backward(a Args) error {
	var dq, dk []float64
	return each("delta backward", a, 0, func(x *head) {
		x.forward(x.given(a.State, a.Entered))
		d := x.backward(near.Decode(x.rows(a.DO)), x.given(a.DState, a.Followed))
		if x.h%(x.heads/a.Q.Len(tensor.Heads)) == 0 { // the first of a key head
			dq, dk = make([]float64, len(d.q)), make([]float64, len(d.k))
		}
		axpy(1, d.q, dq)
		axpy(1, d.k, dk)
		near.Encode(x.rows(a.DQ), dq)
		near.Encode(x.rows(a.DK), dk)
		near.Encode(x.rows(a.DV), d.v)
		near.Encode(x.rows(a.DG), d.g)
		near.Encode(x.rows(a.DBeta), d.beta)
	})
}

// Compose composes maps, or applies them to states; see Kernel.
func (Reference) Compose(dst, later, earlier View) error {
	if err := CheckCompose(dst, later, earlier); err != nil {
		return err
	}
	dim, cols, dimV := later.Len(tensor.Heads), earlier.Len(tensor.Dim), later.Len(tensor.Dim)-later.Len(tensor.Heads)
	m, s := near.Decode(later), near.Decode(earlier)
	z := make([]float64, len(s))
	for i := range len(s) / cols { // row i of all maps
		row, of := z[i*cols:][:cols], m[i*(dim+dimV):][:dim+dimV]
		copy(row[cols-dimV:], of[dim:])
		for j := range dim {
			axpy(of[j], s[(i/dim*dim+j)*cols:], row)
		}
	}
	near.Encode(dst, z)
	return nil
}

// each calls f for every segment, sample and value head.
func each(call string, a Args, front int, f func(x *head)) error {
	if _, err := a.Check(call); err != nil {
		return err
	}
	batch, heads, dimV := a.V.Len(tensor.Batch), a.V.Len(tensor.Heads), a.V.Len(tensor.Dim)
	for i := range len(a.Segments) * batch * heads {
		n := i / heads
		x := &head{b: n % batch, batch: batch, n: n, h: i % heads, segment: a.Segments[n/batch], heads: heads,
			scale: a.Scale, dim: a.Q.Len(tensor.Dim), dimV: dimV, front: front, cols: front + dimV}
		x.q, x.k, x.v = near.Decode(x.rows(a.Q)), near.Decode(x.rows(a.K)), near.Decode(x.rows(a.V))
		x.g, x.beta = near.Decode(x.rows(a.G)), near.Decode(x.rows(a.Beta))
		f(x)
	}
	return nil
}

// rows returns the head's part of an input or of its gradient.
func (x *head) rows(v View) View {
	h := x.h * v.Len(tensor.Heads) / x.heads
	return v.Slice(tensor.Batch, x.b, x.b+1).Slice(tensor.Seq, x.segment.Lo, x.segment.Hi).Slice(tensor.Heads, h, h+1)
}

// state returns the head's part of states or maps.
func (x *head) state(v View, n int) View {
	return v.Slice(tensor.Batch, n, n+1).Slice(tensor.Seq, x.h, x.h+1)
}

// given returns the head's part of the states of the listed segments, or 0.
func (x *head) given(v View, list []int) []float64 {
	if i, found := slices.BinarySearch(list, x.n/x.batch); found {
		return near.Decode(x.state(v, i*x.batch+x.b))
	}
	return make([]float64, x.dim*x.cols)
}

// identity returns the map I | 0.
func (x *head) identity() []float64 {
	s := make([]float64, x.dim*x.cols)
	for i := range x.dim {
		s[i*x.cols+i] = 1
	}
	return s
}

// forward takes s through the rows and returns o.
func (x *head) forward(s []float64) []float64 {
	o := make([]float64, len(x.v))
	for t := range x.g {
		k, out, u := x.k[t*x.dim:], o[t*x.dimV:][:x.dimV], make([]float64, x.cols)
		scale(math.Exp(x.g[t]), s)
		x.decayed = append(x.decayed, slices.Clone(s))
		copy(u[x.front:], x.v[t*x.dimV:])
		for i := range x.dim {
			axpy(-k[i], s[i*x.cols:], u)
		}
		scale(x.beta[t], u)
		x.u = append(x.u, u)
		for i := range x.dim {
			axpy(k[i], u, s[i*x.cols:][:x.cols])
			axpy(x.scale*x.q[t*x.dim+i], s[i*x.cols+x.front:], out)
		}
	}
	return o
}

// backward takes ds, the gradient of the state, back through the rows and returns the gradients of the inputs. Those of
// a map's head have no meaning.
func (x *head) backward(do, ds []float64) head {
	like := func(xs []float64) []float64 { return make([]float64, len(xs)) }
	d := head{q: like(x.q), k: like(x.k), v: like(x.v), g: like(x.g), beta: like(x.g)}
	row := func(of []float64, i int) []float64 { return of[i*x.cols:][:x.cols] }
	for t := len(x.g) - 1; t >= 0; t-- {
		q, k, s, u, decay := x.q[t*x.dim:], x.k[t*x.dim:], x.decayed[t], x.u[t], math.Exp(x.g[t])
		out, dk, du, miss := do[t*x.dimV:][:x.dimV], d.k[t*x.dim:], like(u), like(u)
		copy(miss[x.front:], x.v[t*x.dimV:])
		for i := range x.dim { // o = scale S'q and S = s + k u'
			d.q[t*x.dim+i] = x.scale * (dot(out, row(s, i)[x.front:]) + k[i]*dot(out, u[x.front:]))
			axpy(x.scale*q[i], out, row(ds, i)[x.front:])
			dk[i] = dot(row(ds, i), u)
			axpy(k[i], row(ds, i), du)
			axpy(-k[i], row(s, i), miss)
		}
		d.beta[t] = dot(du, miss) // u = beta miss, and miss = v - s'k
		scale(x.beta[t], du)
		copy(d.v[t*x.dimV:], du[x.front:])
		for i := range x.dim {
			dk[i] -= dot(row(s, i), du)
			axpy(-k[i], du, row(ds, i))
			d.g[t] += dot(row(ds, i), row(s, i))
		}
		scale(decay, ds)
	}
	return d
}

func dot(x, y []float64) (sum float64) {
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

// axpy adds a x to y.
func axpy(a float64, x, y []float64) {
	for i := range y {
		y[i] += a * x[i]
	}
}

func scale(a float64, x []float64) {
	for i := range x {
		x[i] *= a
	}
}
