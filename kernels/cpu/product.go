package cpu

import (
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/tensor"
)

// product is out [m, n] = left [m, k] right [k, n], or adds it, or starts from begin. Sums go over blocks of k, in
// order within each, so the tiles do not change an element's bits, nor do other rows. It rounds 16-bit results after
// the complete sum.
type product[T tensor.Float] struct {
	m, n, k     int
	loops       simd.Loops[T]
	left, right factor[T]
	out         memory[T]
	begin       *memory[T] // nil: 0
	accumulate  bool
}

// A factor is a factor of a product: element (i, j) is at i*ld+j, of one that is turned at j*ld+i.
type factor[T tensor.Float] struct {
	memory[T]
	ld     int
	turned bool
}

// A tile of a product packs its part of the right factor for itself. So tiles are as large as there are still enough of
// them, and large ones need few loads for an element that they compute.
const (
	tileRows  = 1020 // whole micro-kernels, of 12 rows and of 6
	tileCols  = 256
	tileBoth  = 516 // rows and columns, where both factors are copied
	leastTile = 60  // rows; a tile has at least one panel of columns
	tileInner = 256
	perWorker = 3 // tiles for each worker at least, for balance
)

// run computes on all workers.
func (p *product[T]) run(c *Kernels) {
	if p.m == 0 || p.n == 0 {
		return
	}
	rows, cols := p.tile(c.workers())
	down, across := blocks(p.m, rows), blocks(p.n, cols)
	c.split(down*across, func(s *scratch, t int) {
		i, j := t/across*rows, t%across*cols
		p.compute(s, i, j, min(rows, p.m-i), min(cols, p.n-j))
	})
}

// tile returns the size of the tiles for that many workers.
func (p *product[T]) tile(workers int) (rows, cols int) {
	rows, cols = tileRows, tileCols
	if p.copied() {
		rows, cols = tileBoth, roundUp(tileBoth, p.loops.Cols)
	}
	for workers > 1 && blocks(p.m, rows)*blocks(p.n, cols) < perWorker*workers {
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
	room := p.room(m, n, inner)
	mem := open[T](s, room[:]...)
	panels, left, spare, strip := mem.take(room[0]), mem.take(room[1]), mem.take(room[2]), mem.take(room[3])
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

// room returns the elements of scratch memory for a tile: of panels, of a copy of the left factor, of results on their
// way, and of what of the right factor is converted at once.
func (p *product[T]) room(m, n, inner int) (room [4]int) {
	padded := p.loops.Padded(n)
	room[0] = padded * inner
	if p.copied() {
		room[1] = inner * m
	}
	if padded > n || isHalf(p.out.dtype) {
		room[2] = m * padded
	}
	if isHalf(p.right.dtype) {
		room[3] = p.loops.Cols * inner
	}
	return room
}

// pack makes panels of cols columns from j on of rows of the right factor.
func (p *product[T]) pack(panels, strip []T, from, rows, j, cols int) {
	l, b := p.loops, p.right
	switch {
	case isHalf(b.dtype):
		for done := 0; done < cols; done += l.Cols {
			p.packStrip(panels[done*rows:], strip, from, rows, j+done, min(l.Cols, cols-done))
		}
	case b.turned:
		l.PackTransposed(panels, b.data[j*b.ld+from:], b.ld, rows, cols, 1)
	default:
		l.Pack(panels, b.data[from*b.ld+j:], b.ld, rows, cols, rows)
	}
}

// packStrip makes one panel of 16 bits, by way of strip.
func (p *product[T]) packStrip(panel, strip []T, from, rows, j, cols int) {
	b := p.right
	if b.turned {
		b.loadRows(strip, j*b.ld+from, b.ld, cols, rows)
		p.loops.PackTransposed(panel, strip, rows, rows, cols, 1)
		return
	}
	b.loadRows(strip, from*b.ld+j, b.ld, rows, cols)
	p.loops.Pack(panel, strip, cols, rows, cols, rows)
}

// start writes the initial values of a tile's sums, and returns the mode of the first block of k. 16-bit results start
// in spare.
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

// copied reports whether tiles copy the left factor: where it is converted; by columns, where each step of k would be
// on a page of its own; and by rows, where those that a micro-kernel reads side by side would share one set of the
// cache.
func (p *product[T]) copied() bool {
	switch x := p.left; {
	case isHalf(x.dtype):
		return true
	case x.turned:
		return x.ld >= page
	default:
		return x.ld%page == 0
	}
}

const page = 1024 // elements; float32 that far apart share a set of most first-level caches

// leftFrom returns rows i to i+m of the left factor, from column from.
func (p *product[T]) leftFrom(mem []T, i, m, from, k int) simd.Left[T] {
	x := p.left
	at := i*x.ld + from
	if x.turned {
		at = from*x.ld + i
	}
	if !p.copied() {
		return simd.Left[T]{A: x.data[at:], Ld: x.ld, Rows: !x.turned}
	}
	n, long := k, m // lines of the copy, and their length
	if !x.turned {
		n, long = m, k
	}
	x.loadRows(mem, at, x.ld, n, long)
	return simd.Left[T]{A: mem, Ld: long, Rows: !x.turned}
}

// store takes a tile of T from memory with wider rows.
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
