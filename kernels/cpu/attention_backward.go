package cpu

import (
	"math"

	"gonum.org/v1/gonum/blas"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// backwardCall is one block of a backward pass. A piece of work is a block of queries and a block of
// keys of one KV head. It adds to dQ of the queries and to dK and dV of the keys, so pieces
// that run at one time must share neither: of an n x n grid of blocks, a round takes the n
// cells with (query block + key block) mod n = round. Rounds follow one another, and so every
// element gets its terms in one order, however many goroutines there are.
type backwardCall[T tensor.Float] struct {
	arith[T]
	dq, dk, dv, do, q, k, v, lse, delta rows[T]
	tiles                               []partition.Tile
	byQuery                             [][]partition.Tile // the tiles that touch each block of queries
	p                                   attention.Softmax
	scores                              *scores[T] // nil: nothing is added to scores
	group                               int        // query heads of a KV head
	batch, seqQ, seqK, kvHeads          int
}

func backward[T tensor.Float](pass *backwardPass, b attention.GradBlock) {
	q, k, v, tiles := pass.q, b.K, b.V, b.Tiles
	if q.Size() == 0 || k.Size() == 0 || v.Size() == 0 || len(tiles) == 0 {
		return
	}
	f := &backwardCall[T]{
		arith: arithOf[T](), dq: rowsOf[T](pass.dq), dk: rowsOf[T](b.DK), dv: rowsOf[T](b.DV),
		do: rowsOf[T](pass.do), q: rowsOf[T](q), k: rowsOf[T](k), v: rowsOf[T](v),
		lse: rowsOf[T](pass.s.LSE), delta: rowsOf[T](pass.s.Delta), tiles: tiles, p: pass.p, scores: scoresOf[T](pass.p.Scores, b.Columns),
		group: q.Len(tensor.Heads) / k.Len(tensor.Heads), batch: q.Len(tensor.Batch),
		seqQ: q.Len(tensor.Seq), seqK: k.Len(tensor.Seq), kvHeads: k.Len(tensor.Heads),
	}
	nq, nk := blocks(f.seqQ, blockQ), blocks(f.seqK, blockK)
	f.sortTiles(nq)
	n := max(nq, nk)
	cells := make([][2]int, 0, min(nq, nk))
	for round := range n {
		cells = cells[:0]
		for i := range nq {
			if j := (round - i + n) % n; j < nk && f.visible(i, j) {
				cells = append(cells, [2]int{i, j})
			}
		}
		per := f.batch * f.kvHeads
		if f.scores.alone(f.batch, q.Len(tensor.Heads)) {
			pass.c.split(len(cells), func(s *scratch, w int) {
				for n := range per {
					f.cell(s, n/f.kvHeads, n%f.kvHeads, cells[w][0], cells[w][1])
				}
			})
			continue
		}
		pass.c.split(len(cells)*per, func(s *scratch, w int) {
			f.cell(s, w%per/f.kvHeads, w%f.kvHeads, cells[w/per][0], cells[w/per][1])
		})
	}
}

// sortTiles fills byQuery, so that a cell does not search all documents of a sequence.
func (f *backwardCall[T]) sortTiles(nq int) {
	f.byQuery = make([][]partition.Tile, nq)
	all := partition.Range{Lo: 0, Hi: f.seqK}
	for _, t := range f.tiles {
		if t, ok := clip(t, partition.Range{Lo: 0, Hi: f.seqQ}, all); ok {
			for i := t.Q.Lo / blockQ; i*blockQ < t.Q.Hi; i++ {
				if t, ok := clip(t, block(i, blockQ, f.seqQ), all); ok {
					f.byQuery[i] = append(f.byQuery[i], t)
				}
			}
		}
	}
}

func (f *backwardCall[T]) visible(i, j int) bool {
	for _, t := range f.byQuery[i] {
		if _, ok := clip(t, t.Q, block(j, blockK, f.seqK)); ok {
			return true
		}
	}
	return false
}

func (f *backwardCall[T]) cell(s *scratch, b, g, i, j int) {
	x := backwardBlock[T]{backwardCall: f, b: b, g: g}
	x.begin(s)
	for _, t := range f.byQuery[i] {
		if t, ok := clip(t, t.Q, block(j, blockK, f.seqK)); ok {
			x.tile(t)
		}
	}
}

// backwardBlock is one piece of work: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
// Keys, values and their gradients are transposed, which makes all inner loops long.
type backwardBlock[T tensor.Float] struct {
	*backwardCall[T]
	b, g int // batch, KV head

	q, do    []T // [blockQ, dim], [blockQ, dimV]
	dq       []T // [blockQ, dim]
	kT, dkT  []T // [dim, blockK]
	vT, dvT  []T // [dimV, blockK]
	s, dp    []T // [blockQ, blockK]: scores, then P, then dS; dP
	capSlope []T // [blockQ, blockK]: d score / d (scale q.k), with a soft cap alone
}

func (x *backwardBlock[T]) begin(s *scratch) {
	dim, dimV, pairs := x.backwardCall.q.dim, x.v.dim, blockQ*blockK
	mem := open[T](s, 2*(blockQ+blockK)*dim+(blockQ+2*blockK)*dimV+3*pairs)
	x.q, x.dq, x.do = mem.take(blockQ*dim), mem.take(blockQ*dim), mem.take(blockQ*dimV)
	x.kT, x.dkT = mem.take(dim*blockK), mem.take(dim*blockK)
	x.vT, x.dvT = mem.take(dimV*blockK), mem.take(dimV*blockK)
	x.s, x.dp, x.capSlope = mem.take(pairs), mem.take(pairs), mem.take(pairs)
}

// tile adds the gradients of one tile of at most blockQ queries and blockK keys.
func (x *backwardBlock[T]) tile(t partition.Tile) {
	f := x.backwardCall
	m, n, dim, dimV, scale := t.Q.Len(), t.K.Len(), f.q.dim, f.v.dim, T(f.p.Scale)
	f.k.packT(x.kT, x.b, t.K.Lo, t.K.Hi, x.g)
	f.v.packT(x.vT, x.b, t.K.Lo, t.K.Hi, x.g)
	clear(x.dkT)
	clear(x.dvT)
	for h := x.g * f.group; h < (x.g+1)*f.group; h++ {
		f.q.pack(x.q, x.b, t.Q.Lo, t.Q.Hi, h)
		f.do.pack(x.do, x.b, t.Q.Lo, t.Q.Hi, h)
		f.mul(blas.NoTrans, blas.NoTrans, m, n, dim, scale, x.q, dim, x.kT, blockK, 0, x.s, blockK)
		x.probabilities(t, h)
		f.mul(blas.Trans, blas.NoTrans, dimV, n, m, 1, x.do, dimV, x.s, blockK, 1, x.dvT, blockK)
		f.mul(blas.NoTrans, blas.NoTrans, m, n, dimV, 1, x.do, dimV, x.vT, blockK, 0, x.dp, blockK)
		x.scoreGrads(t, h)
		f.mul(blas.Trans, blas.NoTrans, dim, n, m, scale, x.q, dim, x.s, blockK, 1, x.dkT, blockK)
		f.mul(blas.NoTrans, blas.Trans, m, dim, n, scale, x.s, blockK, x.kT, blockK, 0, x.dq, dim)
		for i := range m {
			dq := f.dq.row(x.b, t.Q.Lo+i, h)
			for d, y := range x.dq[i*dim:][:dim] {
				dq[d] += y
			}
		}
	}
	f.dk.addT(x.dkT, x.b, t.K.Lo, t.K.Hi, x.g)
	f.dv.addT(x.dvT, x.b, t.K.Lo, t.K.Hi, x.g)
}

// probabilities turns scores into P = exp(S - LSE), 0 where a pair is hidden or a row empty.
func (x *backwardBlock[T]) probabilities(t partition.Tile, h int) {
	n := t.K.Len()
	for i := range t.Q.Len() {
		s := x.s[i*blockK:][:n]
		lse := x.lse.row(x.b, t.Q.Lo+i, h)[0]
		lo, hi := columns(t.Band, t.Q.Lo+i, t.K.Lo, n)
		if lo >= hi || math.IsInf(float64(lse), -1) {
			clear(s)
			continue
		}
		clear(s[:lo])
		clear(s[hi:])
		if x.p.Softcap > 0 {
			softcap(s[lo:hi], x.capSlope[i*blockK+lo:], x.p.Softcap)
		}
		x.scores.add(s[lo:hi], x.b, t.Q.Lo+i, h, t.K.Lo+lo)
		x.expRow(s[lo:hi], lse)
	}
}

// scoreGrads turns P into dS = P * (dP - delta), where P is not 0.
func (x *backwardBlock[T]) scoreGrads(t partition.Tile, h int) {
	n := t.K.Len()
	for i := range t.Q.Len() {
		lo, hi := columns(t.Band, t.Q.Lo+i, t.K.Lo, n)
		if lo >= hi || math.IsInf(float64(x.lse.row(x.b, t.Q.Lo+i, h)[0]), -1) {
			continue
		}
		delta := x.delta.row(x.b, t.Q.Lo+i, h)[0]
		s := x.s[i*blockK+lo : i*blockK+hi]
		dp := x.dp[i*blockK+lo:][:len(s)]
		for j := range s {
			s[j] *= dp[j] - delta
		}
		x.scores.grad(s, x.b, t.Q.Lo+i, h, t.K.Lo+lo)
		if x.p.Softcap > 0 {
			slope := x.capSlope[i*blockK+lo:][:len(s)]
			for j := range s {
				s[j] *= slope[j]
			}
		}
	}
}
