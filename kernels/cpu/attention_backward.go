package cpu

import (
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A backwardCall computes one block of a backward pass. A piece of work, a cell, is a block of queries and a block of
// keys of one KV head. It adds to dQ of the queries and to dK and dV of the keys, so concurrent cells must share
// neither: in an n x n grid, a round is the n cells with (query block + key block) mod n = round. A cell waits for the
// cells of earlier rounds that share its queries or its keys. So the order of sums does not depend on the goroutines.
type backwardCall[T tensor.Float] struct {
	loops                               simd.Loops[T]
	dq, dk, dv, do, q, k, v, lse, delta rows[T]
	tiles                               []partition.Tile
	byQuery                             [][]partition.Tile // the tiles that touch each block of queries
	params                              attention.Softmax
	scores                              *scores[T] // nil: no bias
	group                               int        // query heads per KV head
	batch, seqQ, seqK, kvHeads          int
	cellK                               int // keys of a cell
}

const (
	// A cell packs its queries once for up to cellBlocks blocks of keys, fewer if there would be less than leastCells
	// cells over the keys. The size depends only on the shape, as does the order of sums.
	cellBlocks = 6
	leastCells = 8
	rowGap     = 16 // elements between rows of scores, so that a panel's rows do not share sets of the first-level cache
)

func backward[T tensor.Float](pass *backwardPass, b attention.GradBlock) {
	q, k, v, tiles := pass.q, b.K, b.V, b.Tiles
	if q.Size() == 0 || k.Size() == 0 || v.Size() == 0 || len(tiles) == 0 {
		return
	}
	f := &backwardCall[T]{
		loops: simd.LoopsOf[T](pass.c.level), dq: rowsOf[T](pass.dq), dk: rowsOf[T](b.DK), dv: rowsOf[T](b.DV),
		do: rowsOf[T](pass.do), q: rowsOf[T](q), k: rowsOf[T](k), v: rowsOf[T](v),
		lse: rowsOf[T](pass.s.LSE), delta: rowsOf[T](pass.s.Delta), tiles: tiles, params: pass.p,
		scores: scoresOf[T](pass.p.Scores, b.Columns),
		group:  q.Len(tensor.Heads) / k.Len(tensor.Heads), batch: q.Len(tensor.Batch),
		seqQ: q.Len(tensor.Seq), seqK: k.Len(tensor.Seq), kvHeads: k.Len(tensor.Heads),
	}
	f.cellK = min(cellBlocks, max(2, blocks(f.seqK, leastCells*blockK))) * blockK
	nq, nk := blocks(f.seqQ, blockQ), blocks(f.seqK, f.cellK)
	f.sortTiles(nq)
	if order := f.order(nq, nk); f.scores.sharesGrad(f.batch, q.Len(tensor.Heads)) {
		inOrder(pass.c, order, 1, func(s *scratch, c cell, _ int) {
			for n := range f.batch * f.kvHeads {
				f.cell(s, n/f.kvHeads, n%f.kvHeads, c.i, c.j)
			}
		})
	} else {
		inOrder(pass.c, order, f.batch*f.kvHeads, func(s *scratch, c cell, n int) {
			f.cell(s, n/f.kvHeads, n%f.kvHeads, c.i, c.j)
		})
	}
}

// sortTiles fills byQuery, so that a cell need not search all documents of a sequence.
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
		if _, ok := clip(t, t.Q, block(j, f.cellK, f.seqK)); ok {
			return true
		}
	}
	return false
}

func (f *backwardCall[T]) cell(s *scratch, b, g, i, j int) {
	x := backwardBlock[T]{backwardCall: f, b: b, g: g, at: block(i, blockQ, f.seqQ)}
	x.begin(s)
	for _, t := range f.byQuery[i] {
		if t, ok := clip(t, t.Q, block(j, f.cellK, f.seqK)); ok {
			x.tile(t)
		}
	}
}

// A backwardBlock holds one piece of work: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
type backwardBlock[T tensor.Float] struct {
	*backwardCall[T]
	b, g int             // batch, KV head
	at   partition.Range // queries
	wide int             // number of queries, padded
	ld   int             // elements of a row of p, ds and slope

	q, qT      []T // panels of queries, and of their transpose times the scale of scores
	do, doT    []T
	k          []T // panels of the cell's keys
	narrow     []T // keys, values, and the packed operand, converted from 16 bits
	p, ds      []T // [blockK, ld]: probabilities, and the gradients of scores
	slope      []T // [blockK, ld]: d score / d (scale q.k), only with a soft cap
	lse, delta []T // of each query
	spare      []T
}

func (x *backwardBlock[T]) begin(s *scratch) {
	l, dim, dimV := x.loops, x.backwardCall.q.dim, x.v.dim
	x.wide = l.Padded(x.at.Len())
	x.ld = x.wide + rowGap
	padded, paddedV, pairs, slopes := l.Padded(dim), l.Padded(dimV), blockK*x.ld, 0
	if x.params.Softcap > 0 {
		slopes = pairs
	}
	keys := min(x.cellK, x.seqK)
	spare := max(blockK, x.wide) * max(padded, paddedV)
	narrow := x.backwardCall.k.scratchLen(keys) + x.v.scratchLen(keys) +
		max(x.backwardCall.q.scratchLen(blockQ), x.backwardCall.do.scratchLen(blockQ))
	mem := open[T](s, x.wide*padded, x.wide*dim, x.wide*paddedV, x.wide*dimV, keys*padded, pairs, pairs, slopes, x.wide,
		x.wide, spare, narrow)
	x.q, x.qT = mem.take(x.wide*padded), mem.take(x.wide*dim)
	x.do, x.doT = mem.take(x.wide*paddedV), mem.take(x.wide*dimV)
	x.k, x.p, x.ds, x.slope = mem.take(keys*padded), mem.take(pairs), mem.take(pairs), mem.take(slopes)
	x.lse, x.delta, x.spare = mem.take(x.wide), mem.take(x.wide), mem.take(spare)
	x.narrow = mem.take(narrow)
}

// keysOf holds keys and values of a tile; first is its first key.
type keysOf[T tensor.Float] struct {
	k, v   matrix[T]
	panels simd.Right[T] // of k
	first  int
}

// tile adds the gradients of one tile of at most blockQ queries and cellK keys, a block of keys at a time.
func (x *backwardBlock[T]) tile(t partition.Tile) {
	f, l := x.backwardCall, x.loops
	k, v := f.k.matrix(x.narrow, x.b, t.K, x.g), f.v.matrix(x.narrow[f.k.scratchLen(t.K.Len()):], x.b, t.K, x.g)
	keys := keysOf[T]{k, v, k.panels(l, x.k, t.K.Len()), t.K.Lo}
	for h := x.g * f.group; h < (x.g+1)*f.group; h++ {
		x.queries(h)
		for j := t.K.Lo; j < t.K.Hi; j += blockK {
			if part, ok := clip(t, t.Q, partition.Range{Lo: j, Hi: min(j+blockK, t.K.Hi)}); ok {
				x.block(h, part, keys)
			}
		}
	}
}

// block adds the gradients of one head and a tile of at most blockK keys.
func (x *backwardBlock[T]) block(h int, t partition.Tile, keys keysOf[T]) {
	var seen [blockQ]partition.Range // for each panel of queries: the visible keys, relative to t.K.Lo
	panels := 0
	for lo := 0; lo < x.wide; lo += x.loops.Cols {
		seen[panels] = x.panel(h, lo, t, keys)
		panels++
	}
	x.keyGrads(h, t, seen[:panels])
}

// queries packs the queries of one head, their dO, LSE and delta.
func (x *backwardBlock[T]) queries(h int) {
	f, l := x.backwardCall, x.loops
	keys := min(f.cellK, f.seqK)
	narrow := x.narrow[f.k.scratchLen(keys)+f.v.scratchLen(keys):]
	q := f.q.matrix(narrow, x.b, x.at, h)
	q.columns(l, x.qT, scoreScale(f.params, f.scores))
	q.panels(l, x.q, x.wide)
	do := f.do.matrix(narrow, x.b, x.at, h)
	do.columns(l, x.doT, 1)
	do.panels(l, x.do, x.wide)
	lse, ld := f.lse.from(x.b, x.at.Lo, h)
	delta, ldd := f.delta.from(x.b, x.at.Lo, h)
	for i := range x.wide {
		x.lse[i], x.delta[i] = T(math.Inf(1)), 0
		if i < x.at.Len() && !math.IsInf(float64(lse[i*ld]), -1) {
			x.lse[i], x.delta[i] = lse[i*ld]*log2e, delta[i*ldd]
		}
	}
}

// panel computes probabilities and gradients of scores of the panel of queries that begins at column lo, and adds to
// the gradients of these queries. It returns the tile's keys that any of them sees.
func (x *backwardBlock[T]) panel(h, lo int, t partition.Tile, keys keysOf[T]) partition.Range {
	f, l, first := x.backwardCall, x.loops, x.at.Lo+lo
	part, ok := clip(t, partition.Range{Lo: first, Hi: first + l.Cols}, t.K)
	if !ok {
		return partition.Range{}
	}
	dim, dimV, cols := f.q.dim, f.v.dim, min(l.Cols, x.wide-lo)
	from, at, n := part.K.Lo-t.K.Lo, part.K.Lo-keys.first, part.K.Len()
	corner := from*x.ld + lo
	p := scoreTile[T]{simd.Scores[T]{S: x.p[corner:], Ld: x.ld, Keys: n, Cols: cols}, part, x.b, h, first}
	ds := p
	ds.S = x.ds[corner:]
	l.Product(n, cols, dim, keys.k.left(at), simd.Right[T]{Panels: x.qT[lo*dim:], Rows: dim}, p.S, p.Ld, simd.Set, nil)
	x.probabilities(p, corner, lo)
	l.Product(n, cols, dimV, keys.v.left(at), simd.Right[T]{Panels: x.doT[lo*dimV:], Rows: dimV}, ds.S, ds.Ld, simd.Set,
		nil)
	x.scoreGrads(ds, p.S, corner, lo)
	keys.panels.From = at
	own := part.Q.Lo - first // leaves out queries of other tiles, which would get 0 * NaN
	left := simd.Left[T]{A: ds.S[own:], Ld: ds.Ld}
	accumulator[T]{f.dq, l, x.spare}.add(x.b, part.Q.Lo, h, part.Q.Len(), n, left, keys.panels)
	return partition.Range{Lo: from, Hi: from + n}
}

// probabilities turns scores into P = exp(S - LSE), 0 for hidden pairs and empty rows.
func (x *backwardBlock[T]) probabilities(p scoreTile[T], corner, lo int) {
	if x.params.Softcap > 0 {
		softcap(p.Scores, x.slope[corner:], x.params.Softcap)
	}
	x.scores.add(p)
	if changed(x.params, x.scores) {
		p.Times(log2e)
	}
	hide(x.loops, p, T(math.Inf(-1)))
	x.loops.Probabilities(p.Scores, x.lse[lo:])
}

// scoreGrads turns dP into dS = P * (dP - delta) * scale.
func (x *backwardBlock[T]) scoreGrads(ds scoreTile[T], p []T, corner, lo int) {
	if !changed(x.params, x.scores) {
		x.loops.GradScores(ds.Scores, p, x.delta[lo:], T(x.params.Scale))
		return
	}
	x.loops.GradScores(ds.Scores, p, x.delta[lo:], 1)
	x.scores.grad(ds)
	for j := range ds.Keys {
		row := ds.S[j*ds.Ld:][:ds.Cols]
		for i := range row {
			row[i] *= T(x.params.Scale)
			if x.params.Softcap > 0 {
				row[i] *= x.slope[corner+j*ds.Ld+i]
			}
		}
	}
}

// stripe is the number of keys whose gradients one product computes: a multiple of the micro-kernels' rows, and small,
// to waste little work on hidden pairs. Each stripe reads the packed queries once.
const stripe = 96

// keyGrads adds to the gradients of a tile's keys and values. The product of a stripe of keys runs from the first to
// the last panel of queries that sees any of them. Values in between that no panel computed are 0.
func (x *backwardBlock[T]) keyGrads(h int, t partition.Tile, seen []partition.Range) {
	f, l := x.backwardCall, x.loops
	for j := 0; j < t.K.Len(); j += stripe {
		at := partition.Range{Lo: j, Hi: min(j+stripe, t.K.Len())}
		from, to := len(seen), 0
		for n, r := range seen {
			if r.Lo < at.Hi && at.Lo < r.Hi {
				from, to = min(from, n), n+1
			}
		}
		if from >= to {
			continue
		}
		for n := from; n < to; n++ {
			x.clearOutside(at, seen[n], n*l.Cols)
		}
		lo, hi := max(from*l.Cols, t.Q.Lo-x.at.Lo), min(to*l.Cols, t.Q.Hi-x.at.Lo)
		add := func(grad rows[T], weights, right []T) {
			left := simd.Left[T]{A: weights[at.Lo*x.ld+lo:], Ld: x.ld, Rows: true}
			accumulator[T]{grad, l, x.spare}.add(x.b, t.K.Lo+at.Lo, x.g, at.Len(), hi-lo, left,
				simd.Right[T]{Panels: right, Rows: x.wide, From: lo})
		}
		add(f.dv, x.p, x.do)
		add(f.dk, x.ds, x.q)
	}
}

// clearOutside zeroes the values of the stripe that a panel of queries did not compute.
func (x *backwardBlock[T]) clearOutside(at, seen partition.Range, lo int) {
	hi := min(lo+x.loops.Cols, x.wide)
	for j := at.Lo; j < at.Hi; j++ {
		if j < seen.Lo || j >= seen.Hi {
			clear(x.p[j*x.ld+lo : j*x.ld+hi])
			clear(x.ds[j*x.ld+lo : j*x.ld+hi])
		}
	}
}
