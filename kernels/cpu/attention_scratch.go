package cpu

import (
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// The size of a block of scores. A row is a key and a column a query: softmax works on full vectors, keys and values
// are read in place, and only the block of queries is transposed.
const (
	blockQ     = 128
	mostQ      = 2 * blockQ // queries of a piece of a long forward pass
	blockK     = 192        // a multiple of the micro-kernels' rows
	groupHeads = 4          // query heads of one KV head that share a packed block of values
)

// A scratch is one worker's memory, kept between calls. It grows to the largest block so far.
type scratch struct {
	f32 []float32
	f64 []float64
	sum [groupHeads * mostQ]float64 // of 2^(score - top), for each head and query
}

// A stack allocates pieces of a scratch.
type stack[T tensor.Float] struct{ free []T }

const (
	lineBytes = 64
	pieceUnit = 16 // pieces begin at multiples of a vector, so that no load spans two cache lines
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

// row returns the elements of [b, s, h, :], in place. Their type must be T.
func (r rows[T]) row(b, s, h int) []T {
	o := at(r.view, b, s, h)
	return r.data[o : o+int64(r.dim) : o+int64(r.dim)]
}

// read returns the elements of [b, s, h, :] in place, or converts them from 16 bits into mem.
func (r rows[T]) read(mem []T, b, s, h int) []T {
	if !isHalf(r.dtype) {
		return r.row(b, s, h)
	}
	r.load(mem[:r.dim], int(at(r.view, b, s, h)))
	return mem[:r.dim]
}

// from returns the memory that begins at row [b, s, h], and the distance of rows.
func (r rows[T]) from(b, s, h int) (data []T, ld int) {
	return r.data[at(r.view, b, s, h):], int(r.view.Stride(tensor.Seq))
}

// A matrix holds rows of one head, as a factor of products.
type matrix[T tensor.Float] struct {
	data          []T
	ld, rows, dim int
}

// matrix returns the rows of one head in span: in place, or converted from 16 bits into mem, of scratchLen elements.
func (r rows[T]) matrix(mem []T, b int, span partition.Range, h int) matrix[T] {
	m := matrix[T]{mem, r.dim, span.Len(), r.dim}
	if !isHalf(r.dtype) {
		m.data, m.ld = r.from(b, span.Lo, h)
		return m
	}
	r.loadRows(mem, int(at(r.view, b, span.Lo, h)), int(r.view.Stride(tensor.Seq)), m.rows, r.dim)
	return m
}

// scratchLen returns the elements of scratch memory that matrix needs for n rows.
func (r rows[T]) scratchLen(n int) int {
	if isHalf(r.dtype) {
		return n * r.dim
	}
	return 0
}

// left returns the rows since the i-th as the left factor of a product.
func (m matrix[T]) left(i int) simd.Left[T] {
	return simd.Left[T]{A: m.data[i*m.ld:], Ld: m.ld, Rows: true}
}

// panels packs the rows, padded with 0 to wide rows, as the right factor of a product.
func (m matrix[T]) panels(l simd.Loops[T], dst []T, wide int) simd.Right[T] {
	l.Pack(dst, m.data, m.ld, m.rows, m.dim, wide)
	return simd.Right[T]{Panels: dst, Rows: wide}
}

// columns packs the rows, times scale, as the columns of the right factor of a product.
func (m matrix[T]) columns(l simd.Loops[T], dst []T, scale T) simd.Right[T] {
	l.PackTransposed(dst, m.data, m.ld, m.dim, m.rows, scale)
	return simd.Right[T]{Panels: dst, Rows: m.dim}
}

// An accumulator adds products to rows of a view. If padded panels are wider than the rows, it computes them in spare,
// which has the padded width.
type accumulator[T tensor.Float] struct {
	rows  rows[T]
	loops simd.Loops[T]
	spare []T
}

// add adds a product of m rows over k to the m rows since s.
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
	c.queue("attention sink", func() { forType(lse, foldSink[float64], foldSink[float32])(c, o, lse, sink) })
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
		forType(lse, sinkGrad[float64], sinkGrad[float32])(c, dsink, do, o, lse, sink)
	})
	return nil
}

var _ attention.Sinks = (*Kernels)(nil)

func foldSink[T tensor.Float](c *Kernels, o, lse, sink tensor.View) {
	out, z, s := rowsOf[T](o), rowsOf[T](lse), rowsOf[T](sink)
	seq := max(o.Len(tensor.Seq), 1)
	c.split(o.Rows(), func(mem *scratch, row int) {
		b, i := row/seq, row%seq
		buf := open[T](mem, out.scratchLen(1)).free
		for h := range o.Len(tensor.Heads) {
			old := &z.row(b, i, h)[0]
			with := logAddExp(float64(*old), float64(s.row(0, 0, h)[0]))
			if math.IsInf(with, -1) {
				continue // no key is visible, and the sink's weight is 0
			}
			shrink := T(math.Exp(float64(*old) - with))
			y := out.read(buf, b, i, h)
			for d := range y {
				y[d] *= shrink
			}
			if isHalf(out.dtype) { // y is a copy
				out.store(int(at(o, b, i, h)), y)
			}
			*old = T(with)
		}
	})
}

// sinkGrad adds up a head's rows in order, one head per worker, so that the sum does not depend on the goroutines.
func sinkGrad[T tensor.Float](c *Kernels, dsink, do, o, lse, sink tensor.View) {
	grad, dy, y, z, s := rowsOf[T](dsink), rowsOf[T](do), rowsOf[T](o), rowsOf[T](lse), rowsOf[T](sink)
	c.split(o.Len(tensor.Heads), func(mem *scratch, h int) {
		room := open[T](mem, dy.scratchLen(1), y.scratchLen(1))
		dys, ys := room.take(dy.scratchLen(1)), room.take(y.scratchLen(1))
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
