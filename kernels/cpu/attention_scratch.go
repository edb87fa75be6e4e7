package cpu

import (
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// The block of scores that is computed at once. Scores of a block stand with a key in each row and a query in each
// column: what softmax does by query is then done to whole vectors, keys and values are read where they lie, and only
// queries, which are a block, are ever transposed.
const (
	blockQ = 128
	mostQ  = 2 * blockQ // queries of a piece of a long forward pass
	blockK = 192        // rows of the micro-kernels come out even
	// groupHeads is how many query heads of one KV head share a packed block of values.
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

// read returns the elements of [b, s, h, :]: in place, or where they have 16 bits in mem.
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

// matrix returns the rows of one head in that span: where they lie, or where they have 16 bits in mem, which has room
// for so many.
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

// left is rows from the i-th on as the left factor of a product.
func (m matrix[T]) left(i int) simd.Left[T] {
	return simd.Left[T]{A: m.data[i*m.ld:], Ld: m.ld, Rows: true}
}

// panels packs the rows, and rows of 0 behind them up to wide, as the right factor of a product.
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
