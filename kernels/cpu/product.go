package cpu

import (
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/tensor"
)

// A product computes out [m, n] = left [m, k] right [k, n], or adds it to out or to begin. Sums run over blocks of k,
// in order within each, so an element's bits do not depend on tiles or other rows. 16-bit results are rounded once,
// after the complete sum.
type product[T tensor.Float] struct {
	m, n, k     int
	loops       simd.Loops[T]
	left, right factor[T]
	out         memory[T]
	begin       *memory[T] // nil: 0
	accumulate  bool
}

// A factor is a factor of a product: element (i, j) is at i*ld+j, or at j*ld+i if it is transposed. With gather, the
// row of the memory is gather[i], or gather[j], instead. With codes, elements are E4M3, each times the scale of its row
// if there are scales.
type factor[T tensor.Float] struct {
	memory[T]
	ld         int
	transposed bool
	gather     []int32
	codes      []uint8
	scales     []float32
}

// Each tile of a product packs its part of the right factor. Large tiles need fewer loads per element, so tiles are as
// large as the number of workers allows.
const (
	tileRows  = 1020 // a multiple of the micro-kernels' 12 and 6 rows
	tileCols  = 256
	tileBoth  = 516 // rows and columns, if both factors are copied
	leastTile = 60  // rows; a tile has at least one panel of columns
	tileInner = 256
	perWorker = 3 // at least this many tiles per worker, for balance
)

// queue queues the product plus add, unless that is the zero View.
func (p *product[T]) queue(c *Kernels, op string, add tensor.View) {
	if !add.IsZero() {
		m := memoryOf[T](add)
		p.begin = &m
	}
	c.queue(op, func() { p.run(c) })
}

// run computes on all workers.
func (p *product[T]) run(c *Kernels) { runAll(c, []*product[T]{p}) }

// A tile is a part of a product: m by n elements from row i, column j.
type tile[T tensor.Float] struct {
	*product[T]
	i, j, rows, cols int
}

// runAll computes independent products on all workers. Their tiles form one list, so that many small products need one
// barrier, and one large product among them still occupies all workers.
func runAll[T tensor.Float](c *Kernels, ps []*product[T]) {
	workers, total := c.workers(), 1
	for _, p := range ps {
		total += p.work()
	}
	var list []tile[T]
	for _, p := range ps {
		least := 1
		if workers > 1 {
			least = blocks(perWorker*workers*p.work(), total)
		}
		rows, cols := p.tile(least)
		for i := 0; i < p.m; i += rows {
			for j := 0; j < p.n; j += cols {
				list = append(list, tile[T]{p, i, j, min(rows, p.m-i), min(cols, p.n-j)})
			}
		}
	}
	c.split(len(list), func(s *scratch, i int) {
		t := &list[i]
		t.compute(s, t.i, t.j, t.rows, t.cols)
	})
}

// work returns the number of multiplications.
func (p *product[T]) work() int { return p.m * p.n * p.k }

// tile returns the size of the tiles, of which there should be at least so many.
func (p *product[T]) tile(least int) (rows, cols int) {
	rows, cols = tileRows, tileCols
	if p.copied() {
		rows, cols = tileBoth, roundUp(tileBoth, p.loops.Cols)
	}
	for blocks(p.m, rows)*blocks(p.n, cols) < least {
		switch {
		case cols > p.loops.Cols && (cols >= p.n || rows < 4*cols):
			cols = max(p.loops.Cols, roundUp(min(cols, p.n)/2, p.loops.Cols))
		case rows > leastTile:
			rows = max(leastTile, roundUp(min(rows, p.m)/2, leastTile/5))
		default:
			return rows, cols
		}
	}
	return rows, cols
}

// compute computes the tile of m by n elements from row i, column j.
func (p *product[T]) compute(s *scratch, i, j, m, n int) {
	inner := p.k
	if parts := blocks(p.k, tileInner); parts > 1 {
		inner = roundUp(blocks(p.k, parts), 8)
	}
	padded := p.loops.Padded(n)
	size := p.scratch(m, n, inner)
	mem := open[T](s, size[:]...)
	panels, left, spare, strip := mem.take(size[0]), mem.take(size[1]), mem.take(size[2]), mem.take(size[3])
	mode := p.start(spare, i, j, m, n)
	for from := 0; from < p.k; from += inner {
		k := min(inner, p.k-from)
		p.pack(panels, strip, from, k, j, n)
		a, b := p.leftFrom(left, i, m, from, k), simd.Right[T]{Panels: panels, Rows: k}
		switch {
		case isHalf(p.out.dtype):
			p.loops.Product(m, n, k, a, b, spare, padded, mode, nil)
		case len(spare) > 0:
			p.loops.Product(m, n, k, a, b, spare, padded, simd.Set, nil)
			p.store(spare, padded, i, j, m, n, mode)
		default:
			p.loops.Product(m, n, k, a, b, p.out.data[i*p.n+j:], p.n, mode, nil)
		}
		mode = simd.Add
	}
	for r := 0; r < m && isHalf(p.out.dtype); r++ {
		p.out.store((i+r)*p.n+j, spare[r*padded:][:n])
	}
}

// scratch returns the sizes of a tile's scratch memory, in elements: panels, the copy of the left factor, intermediate
// results, and a converted strip of the right factor.
func (p *product[T]) scratch(m, n, inner int) (size [4]int) {
	padded := p.loops.Padded(n)
	size[0] = padded * inner
	if p.copied() {
		size[1] = inner * m
	}
	if padded > n || isHalf(p.out.dtype) {
		size[2] = m * padded
	}
	if p.right.loaded() {
		size[3] = p.loops.Cols * inner
	}
	return size
}

// pack packs a block of the right factor, of the given rows and columns, into panels.
func (p *product[T]) pack(panels, strip []T, from, rows, j, cols int) {
	l, b := p.loops, p.right
	switch {
	case b.loaded():
		for done := 0; done < cols; done += l.Cols {
			p.packStrip(panels[done*rows:], strip, from, rows, j+done, min(l.Cols, cols-done))
		}
	case b.transposed:
		l.PackTransposed(panels, b.data[j*b.ld+from:], b.ld, rows, cols, 1)
	default:
		l.Pack(panels, b.data[from*b.ld+j:], b.ld, rows, cols, rows)
	}
}

// packStrip packs one panel of loaded elements. strip holds them in type T.
func (p *product[T]) packStrip(panel, strip []T, from, rows, j, cols int) {
	b := p.right
	if b.transposed {
		b.read(strip, j, from, cols, rows)
		p.loops.PackTransposed(panel, strip, rows, rows, cols, 1)
		return
	}
	b.read(strip, from, j, rows, cols)
	p.loops.Pack(panel, strip, cols, rows, cols, rows)
}

// start writes the initial values of a tile's sums, to spare if results have 16 bits, and returns the mode of the first
// block of k.
func (p *product[T]) start(spare []T, i, j, m, n int) simd.Mode {
	if p.begin == nil && p.k > 0 && !p.accumulate {
		return simd.Set
	}
	half, padded := isHalf(p.out.dtype), p.loops.Padded(n)
	for r := range m {
		at := (i+r)*p.n + j
		var row []T
		if half {
			row = spare[r*padded:][:n]
			clear(row[n:padded])
		} else {
			row = p.out.data[at:][:n]
		}
		switch {
		case p.begin != nil:
			p.begin.load(row, at)
		case !p.accumulate:
			clear(row)
		case half:
			p.out.load(row, at)
		}
	}
	return simd.Add
}

// copied reports whether tiles copy the left factor. They do if it is loaded; by columns, if each step of k would touch
// another page; and by rows, if the rows of a micro-kernel would share one set of the cache.
func (p *product[T]) copied() bool {
	switch x := p.left; {
	case x.loaded():
		return true
	case x.transposed:
		return x.ld >= page
	default:
		return x.ld%page == 0
	}
}

const page = 1024 // elements; at this distance, float32 share a set of most first-level caches

// leftFrom returns rows i to i+m of the left factor, from column from.
func (p *product[T]) leftFrom(mem []T, i, m, from, k int) simd.Left[T] {
	x := p.left
	row, col, n, long := i, from, m, k // rows of the memory, and their part
	if x.transposed {
		row, col, n, long = from, i, k, m
	}
	if !p.copied() {
		return simd.Left[T]{A: x.data[row*x.ld+col:], Ld: x.ld, Rows: !x.transposed}
	}
	x.read(mem, row, col, n, long)
	return simd.Left[T]{A: mem, Ld: long, Rows: !x.transposed}
}

// loaded reports whether elements cannot be read in place as a matrix of T.
func (f factor[T]) loaded() bool { return isHalf(f.dtype) || f.gather != nil || f.codes != nil }

// read reads n elements, the first in column col, of each of some rows of the memory into dst, without gaps.
func (f factor[T]) read(dst []T, row, col, rows, n int) {
	switch {
	case f.codes != nil:
		for i := range rows {
			from, scale := row+i, T(1)
			if f.gather != nil {
				from = int(f.gather[row+i])
			}
			if f.scales != nil {
				scale = T(f.scales[from])
			}
			for k, code := range f.codes[from*f.ld+col:][:n] {
				dst[i*n+k] = T(fromE4M3[code]) * scale
			}
		}
	case f.gather == nil:
		f.loadRows(dst, row*f.ld+col, f.ld, rows, n)
	default:
		for i, from := range f.gather[row:][:rows] {
			f.load(dst[i*n:][:n], int(from)*f.ld+col)
		}
	}
}

// store copies or adds a tile from spare, whose rows are padded, to the result.
func (p *product[T]) store(spare []T, padded, i, j, m, n int, mode simd.Mode) {
	for r := range m {
		to, from := p.out.data[(i+r)*p.n+j:][:n], spare[r*padded:][:n]
		if mode == simd.Set {
			copy(to, from)
			continue
		}
		for x, y := range from {
			to[x] += y
		}
	}
}
