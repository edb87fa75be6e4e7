package cpu

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/blas"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// forwardCall is the folding of one block. A piece of work is a block of queries of up to
// groupHeads heads of one KV head; it owns their rows of O and LSE.
type forwardCall[T tensor.Float] struct {
	arith[T]
	o, lse, q, k, v rows[T]
	tiles           []partition.Tile
	p               attention.Softmax
	scores          *scores[T] // nil: nothing is added to scores, and nothing kept of them
	group           int        // query heads of a KV head
	chunks          int        // pieces of a group
	seqQ, kvHeads   int
}

// forwardBlock is the state of one piece of work: FlashAttention-2 (arXiv:2307.08691),
// algorithm 1, started from what acc holds already.
type forwardBlock[T tensor.Float] struct {
	*forwardCall[T]
	b, g, h0, h1 int             // batch, KV head, query heads
	at           partition.Range // queries

	q, o   []T       // by head, blockQ rows; o is not yet divided by sum
	m      []T       // by head, blockQ: the largest score so far
	sum    []float64 // by head, blockQ: sum of exp(score - m)
	kT, vT []T       // [dim, blockK], [dimV, blockK]
	s, pv  []T       // [blockQ, blockK] scores; [blockQ, dimV] what they add
	shrink []T       // blockQ: exp(old m - new m)
}

func forward[T tensor.Float](pass *forwardPass, b attention.Block) {
	q, k, v, tiles := pass.q, b.K, b.V, b.Tiles
	if q.Size() == 0 || k.Size() == 0 || v.Size() == 0 || len(tiles) == 0 {
		return
	}
	f := &forwardCall[T]{
		arith: arithOf[T](), o: rowsOf[T](pass.acc.O), lse: rowsOf[T](pass.acc.LSE),
		q: rowsOf[T](q), k: rowsOf[T](k), v: rowsOf[T](v), tiles: tiles, p: pass.p, scores: scoresOf[T](pass.p.Scores, b.Columns),
		group: q.Len(tensor.Heads) / k.Len(tensor.Heads), seqQ: q.Len(tensor.Seq), kvHeads: k.Len(tensor.Heads),
	}
	f.chunks = blocks(f.group, groupHeads)
	n := q.Len(tensor.Batch) * f.kvHeads * f.chunks * blocks(f.seqQ, blockQ)
	pass.c.split(n, func(s *scratch, i int) { f.piece(s, i) })
}

// piece computes the n-th piece of work. The last queries come first: under a causal mask
// they have the most keys, and the longest work is best begun early.
func (f *forwardCall[T]) piece(s *scratch, n int) {
	per := f.kvHeads * f.chunks
	head := n % per
	n /= per
	nq := blocks(f.seqQ, blockQ)
	x := forwardBlock[T]{forwardCall: f, b: n / nq, g: head / f.chunks, at: block(nq-1-n%nq, blockQ, f.seqQ)}
	x.h0 = x.g*f.group + head%f.chunks*groupHeads
	x.h1 = min(x.h0+groupHeads, (x.g+1)*f.group)

	begun := false
	for _, t := range f.tiles {
		t, ok := clip(t, x.at, partition.Range{Lo: 0, Hi: t.K.Hi})
		if !ok {
			continue
		}
		if !begun {
			x.begin(s)
			begun = true
		}
		for j := t.K.Lo; j < t.K.Hi; j += blockK {
			if t, ok := clip(t, t.Q, partition.Range{Lo: j, Hi: min(j+blockK, t.K.Hi)}); ok {
				x.keys(t)
			}
		}
	}
	if begun {
		x.end()
	}
}

// begin loads the queries and the state. An LSE is the state (m = LSE, sum = 1); where it is
// -Inf, the first key shrinks that sum to 0.
func (x *forwardBlock[T]) begin(s *scratch) {
	heads, dim, dimV := x.h1-x.h0, x.forwardCall.q.dim, x.v.dim
	mem := open[T](s, heads*blockQ*(dim+dimV+1)+(dim+dimV)*blockK+blockQ*(blockK+dimV+1))
	x.q, x.o, x.m = mem.take(heads*blockQ*dim), mem.take(heads*blockQ*dimV), mem.take(heads*blockQ)
	x.kT, x.vT = mem.take(dim*blockK), mem.take(dimV*blockK)
	x.s, x.pv, x.shrink = mem.take(blockQ*blockK), mem.take(blockQ*dimV), mem.take(blockQ)
	x.sum = s.sum[:]
	for h := x.h0; h < x.h1; h++ {
		at := (h - x.h0) * blockQ
		x.forwardCall.q.pack(x.q[at*dim:], x.b, x.at.Lo, x.at.Hi, h)
		x.forwardCall.o.pack(x.o[at*dimV:], x.b, x.at.Lo, x.at.Hi, h)
		for i := range x.at.Len() {
			x.m[at+i], x.sum[at+i] = x.lse.row(x.b, x.at.Lo+i, h)[0], 1
		}
	}
}

// keys folds one tile of at most blockK keys.
func (x *forwardBlock[T]) keys(t partition.Tile) {
	dim, dimV := x.forwardCall.q.dim, x.v.dim
	n, m := t.K.Len(), t.Q.Len()
	x.k.packT(x.kT, x.b, t.K.Lo, t.K.Hi, x.g)
	x.v.packT(x.vT, x.b, t.K.Lo, t.K.Hi, x.g)
	for h := range x.h1 - x.h0 {
		row := h*blockQ + t.Q.Lo - x.at.Lo
		x.mul(blas.NoTrans, blas.NoTrans, m, n, dim, T(x.p.Scale), x.q[row*dim:], dim, x.kT, blockK, 0, x.s, blockK)
		for i := range m {
			lo, hi := columns(t.Band, t.Q.Lo+i, t.K.Lo, n)
			s := x.s[i*blockK:][:n]
			if x.p.Softcap > 0 && lo < hi {
				softcap(s[lo:hi], nil, x.p.Softcap)
			}
			if x.scores != nil && lo < hi {
				x.scores.add(s[lo:hi], x.b, t.Q.Lo+i, x.h0+h, t.K.Lo+lo)
				x.scores.keep(rowMax(s[lo:hi]), x.b, t.Q.Lo+i, x.h0+h)
			}
			x.shrink[i] = x.softmax(s, lo, hi, row+i)
		}
		x.mul(blas.NoTrans, blas.Trans, m, dimV, n, 1, x.s, blockK, x.vT, blockK, 0, x.pv, dimV)
		for i := range m {
			o, pv, a := x.o[(row+i)*dimV:][:dimV], x.pv[i*dimV:][:dimV], x.shrink[i]
			for d := range o {
				o[d] = o[d]*a + pv[d]
			}
		}
	}
}

// softmax turns a row of scores, of which [lo, hi) are visible, into exp(s - m) with the new
// m, and returns what the row's earlier sums shrink by.
func (x *forwardBlock[T]) softmax(s []T, lo, hi, row int) T {
	if lo >= hi {
		clear(s)
		return 1
	}
	clear(s[:lo])
	clear(s[hi:])
	seen := s[lo:hi]
	m := max(x.m[row], rowMax(seen))
	if math.IsInf(float64(m), -1) {
		clear(seen) // every score is -Inf; exp(s - m) would be NaN
		return 1
	}
	shrink := math.Exp(float64(x.m[row] - m))
	x.sum[row] = x.sum[row]*shrink + x.expRow(seen, m)
	x.m[row] = m
	return T(shrink)
}

// end divides by the sums and writes the state back.
func (x *forwardBlock[T]) end() {
	dimV := x.v.dim
	for h := x.h0; h < x.h1; h++ {
		for i := range x.at.Len() {
			row := (h-x.h0)*blockQ + i
			m, sum := x.m[row], x.sum[row]
			if math.IsInf(float64(m), -1) {
				continue // no key yet
			}
			x.lse.row(x.b, x.at.Lo+i, h)[0] = m + T(math.Log(sum))
			o := x.forwardCall.o.row(x.b, x.at.Lo+i, h)
			scale := T(1 / sum)
			for d, y := range x.o[row*dimV:][:dimV] {
				o[d] = y * scale
			}
		}
	}
}

// rowMax is the maximum of s, whose NaNs count only where there is nothing but -Inf beside
// them: elsewhere the sum of exponentials shows them. Four chains are faster than the built-in
// max, which looks for NaN at every step.
func rowMax[T tensor.Float](s []T) T {
	inf := T(math.Inf(-1))
	a, b, c, d := inf, inf, inf, inf
	x := s
	for ; len(x) >= 4; x = x[4:] {
		if x[0] > a {
			a = x[0]
		}
		if x[1] > b {
			b = x[1]
		}
		if x[2] > c {
			c = x[2]
		}
		if x[3] > d {
			d = x[3]
		}
	}
	for _, y := range x {
		if y > a {
			a = y
		}
	}
	if m := max(a, b, c, d); m > inf {
		return m
	}
	return slices.Max(s)
}
