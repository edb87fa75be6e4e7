package cpu

import (
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// The block of scores that is computed at once. A row is a key and a column a query, so that softmax by query works on
// whole vectors, keys and values are read in place, and only the block of queries is ever transposed.
const (
	blockQ = 128
	mostQ  = 2 * blockQ // queries of a piece of a long forward pass
	blockK = 192        // rows of the micro-kernels come out even
	// groupHeads counts the query heads of one KV head that share a packed block of values.
	groupHeads = 4
)

// A scratch is one worker's memory, kept between calls. It grows to the largest block that was computed.
type scratch struct {
	f32 []float32
	f64 []float64
	sum [groupHeads * mostQ]float64 // of 2^(score - top), by head and query
}

// stack hands out pieces of a scratch.
type stack[T tensor.Float] struct{ free []T }

const (
	lineBytes = 64
	pieceUnit = 16 // pieces begin at multiples of a vector, so that no load of one spans two cache lines
)

// open returns a stack of uninitialised memory for the given pieces.
func open[T tensor.Float](s *scratch, pieces ...int) stack[T] {
	p, ok := any(&s.f32).(*[]T)
	if !ok {
		p = any(&s.f64).(*[]T)
	}
	n := pieceUnit
	for _, x := range pieces {
		n += roundUp(x, pieceUnit)
	}
	return stack[T]{aligned(grow(p, n))}
}

func (s *stack[T]) take(n int) []T {
	x := s.free[:n:n]
	s.free = s.free[min(roundUp(n, pieceUnit), len(s.free)):]
	return x
}

func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

// rows reads a strided view row by row.
type rows[T tensor.Float] struct {
	memory[T]
	view tensor.View
	dim  int
}

func rowsOf[T tensor.Float](v tensor.View) rows[T] {
	return rows[T]{memoryOf[T](v), v, v.Len(tensor.Dim)}
}

// row returns the elements of [b, s, h, :], in place. They do not have 16 bits.
func (r rows[T]) row(b, s, h int) []T {
	o := at(r.view, b, s, h)
	return r.data[o : o+int64(r.dim) : o+int64(r.dim)]
}

// read returns the elements of [b, s, h, :]: in place, or, if they have 16 bits, in mem.
func (r rows[T]) read(mem []T, b, s, h int) []T {
	if !isHalf(r.dtype) {
		return r.row(b, s, h)
	}
	r.load(mem[:r.dim], int(at(r.view, b, s, h)))
	return mem[:r.dim]
}

// write sets the elements of [b, s, h, :] to what read returned, changed in place.
func (r rows[T]) write(b, s, h int, x []T) {
	if isHalf(r.dtype) {
		r.store(int(at(r.view, b, s, h)), x)
	}
}

// from returns the memory from row [b, s, h] on, and how far the next row is.
func (r rows[T]) from(b, s, h int) (data []T, ld int) {
	return r.data[at(r.view, b, s, h):], int(r.view.Stride(tensor.Seq))
}

// matrix is rows of one head as products read them.
type matrix[T tensor.Float] struct {
	data          []T
	ld, rows, dim int
}

// matrix returns the rows of one head in that span: in place, or converted from 16 bits into mem, which has the room.
func (r rows[T]) matrix(mem []T, b int, span partition.Range, h int) matrix[T] {
	m := matrix[T]{mem, r.dim, span.Len(), r.dim}
	if !isHalf(r.dtype) {
		m.data, m.ld = r.from(b, span.Lo, h)
		return m
	}
	r.loadRows(mem, int(at(r.view, b, span.Lo, h)), int(r.view.Stride(tensor.Seq)), m.rows, r.dim)
	return m
}

// room returns what matrix takes of scratch memory for n rows.
func (r rows[T]) room(n int) int {
	if isHalf(r.dtype) {
		return n * r.dim
	}
	return 0
}

// left returns rows from the i-th as the left factor of a product.
func (m matrix[T]) left(i int) simd.Left[T] {
	return simd.Left[T]{A: m.data[i*m.ld:], Ld: m.ld, Rows: true}
}

// panels packs the rows, and rows of 0 after them up to wide, as the right factor of a product.
func (m matrix[T]) panels(l simd.Loops[T], dst []T, wide int) simd.Right[T] {
	l.Pack(dst, m.data, m.ld, m.rows, m.dim, wide)
	return simd.Right[T]{Panels: dst, Rows: wide}
}

// columns packs the rows, times scale, as the columns of the right factor of a product.
func (m matrix[T]) columns(l simd.Loops[T], dst []T, scale T) simd.Right[T] {
	l.PackTransposed(dst, m.data, m.ld, m.dim, m.rows, scale)
	return simd.Right[T]{Panels: dst, Rows: m.dim}
}

// accumulator adds products to rows of a view. Where panels are wider than the rows, it goes by way of spare, which has
// room for as many rows of full panels.
type accumulator[T tensor.Float] struct {
	rows  rows[T]
	loops simd.Loops[T]
	spare []T
}

// add adds a product of m rows over k to the rows from s on.
func (x accumulator[T]) add(b, s, h, m, k int, left simd.Left[T], right simd.Right[T]) {
	dim, padded := x.rows.dim, x.loops.Padded(x.rows.dim)
	if dim == padded {
		data, ld := x.rows.from(b, s, h)
		x.loops.Product(m, dim, k, left, right, data, ld, simd.Add, nil)
		return
	}
	x.loops.Product(m, dim, k, left, right, x.spare, padded, simd.Set, nil)
	for i := range m {
		y := x.rows.row(b, s+i, h)
		for d, v := range x.spare[i*padded:][:dim] {
			y[d] += v
		}
	}
}

// FoldSink folds sinks into attention; see attention.Sinks.
func (c *Kernels) FoldSink(o, lse, sink tensor.View) error {
	if err := attention.CheckFoldSink(o, lse, sink); err != nil {
		return err
	}
	if err := computable("attention sink", o, lse, sink); err != nil {
		return err
	}
	c.queue("attention sink", func() {
		if lse.DType() == tensor.F64 {
			foldSink[float64](c, o, lse, sink)
		} else {
			foldSink[float32](c, o, lse, sink)
		}
	})
	return nil
}

// SinkGrad sets dsink to the gradient of the sinks; see attention.Sinks.
func (c *Kernels) SinkGrad(dsink, do, o, lse, sink tensor.View) error {
	if err := attention.CheckSinkGrad(dsink, do, o, lse, sink); err != nil {
		return err
	}
	if err := computable("attention sink gradient", o, do, lse, sink, dsink); err != nil {
		return err
	}
	c.queue("attention sink gradient", func() {
		if lse.DType() == tensor.F64 {
			sinkGrad[float64](c, dsink, do, o, lse, sink)
		} else {
			sinkGrad[float32](c, dsink, do, o, lse, sink)
		}
	})
	return nil
}

var _ attention.Sinks = (*Kernels)(nil)

func foldSink[T tensor.Float](c *Kernels, o, lse, sink tensor.View) {
	out, z, s := rowsOf[T](o), rowsOf[T](lse), rowsOf[T](sink)
	seq := max(o.Len(tensor.Seq), 1)
	c.split(o.Rows(), func(mem *scratch, row int) {
		b, i := row/seq, row%seq
		buf := open[T](mem, out.room(1)).free
		for h := range o.Len(tensor.Heads) {
			old := &z.row(b, i, h)[0]
			with := logAddExp(float64(*old), float64(s.row(0, 0, h)[0]))
			if math.IsInf(with, -1) {
				continue // neither a key nor the sink has any weight
			}
			shrink := T(math.Exp(float64(*old) - with))
			y := out.read(buf, b, i, h)
			for d := range y {
				y[d] *= shrink
			}
			out.write(b, i, h, y)
			*old = T(with)
		}
	})
}

// sinkGrad adds up a head's rows in order, one head a worker, so that the sum is the same bits.
func sinkGrad[T tensor.Float](c *Kernels, dsink, do, o, lse, sink tensor.View) {
	grad, dy, y, z, s := rowsOf[T](dsink), rowsOf[T](do), rowsOf[T](o), rowsOf[T](lse), rowsOf[T](sink)
	c.split(o.Len(tensor.Heads), func(mem *scratch, h int) {
		room := open[T](mem, dy.room(1), y.room(1))
		dys, ys := room.take(dy.room(1)), room.take(y.room(1))
		at, total := float64(s.row(0, 0, h)[0]), 0.0
		for b := range o.Len(tensor.Batch) {
			for i := range o.Len(tensor.Seq) {
				lse := float64(z.row(b, i, h)[0])
				if math.IsInf(lse, -1) {
					continue
				}
				sum, x := 0.0, y.read(ys, b, i, h)
				for d, g := range dy.read(dys, b, i, h) {
					sum += float64(g) * float64(x[d])
				}
				total -= math.Exp(at-lse) * sum
			}
		}
		grad.row(0, 0, h)[0] = T(total)
	})
}

// logAddExp returns the logarithm of exp(a) + exp(b).
func logAddExp(a, b float64) float64 {
	m := max(a, b)
	if math.IsInf(m, 0) {
		return m
	}
	return m + math.Log1p(math.Exp(min(a, b)-m))
}
