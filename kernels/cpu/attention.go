package cpu

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Forward begins a forward pass; see attention.Kernel.
func (c *Kernels) Forward(
	o tensor.View, acc attention.Partial, q tensor.View, p attention.Softmax,
) (attention.ForwardPass, error) {
	if err := attention.CheckForward(o, acc, q, p); err != nil {
		return nil, err
	}
	all := append([]tensor.View{q, o, acc.O, acc.LSE}, views(p.Scores)...)
	if err := computable("attention forward", all...); err != nil {
		return nil, err
	}
	c.queue("attention reset", func() {
		fillAny(acc.O, 0)
		fillAny(acc.LSE, math.Inf(-1))
		if p.Scores != nil && !p.Scores.Max.IsZero() {
			fillAny(p.Scores.Max, math.Inf(-1))
		}
	})
	c.Launch(fmt.Sprintf("cpu %v (%v)", q.DType(), c.level))
	c.forward = forwardPass{c, o, acc, q, p}
	return &c.forward, nil
}

// A forwardPass is a forward pass. Queued work has a copy of it, so that Kernels can reuse the memory for the next
// pass.
type forwardPass struct {
	c   *Kernels
	o   tensor.View
	acc attention.Partial
	q   tensor.View
	p   attention.Softmax
}

// Block folds a block of keys into the accumulator.
func (f *forwardPass) Block(b attention.Block) error {
	if err := attention.CheckBlock(f.acc.O, f.q, b, f.p); err != nil {
		return err
	}
	if err := computable("attention forward", f.q, b.K, b.V); err != nil {
		return err
	}
	x := *f
	b.Tiles, b.Columns = slices.Clone(b.Tiles), slices.Clone(b.Columns)
	x.c.queue("attention forward", func() { forType(x.q, forward[float64], forward[float32])(&x, b) })
	return nil
}

// End sets o to the accumulator.
func (f *forwardPass) End() error {
	o, acc := f.o, f.acc.O
	if o != acc {
		f.c.Copy(o, acc)
	}
	return nil
}

// Backward begins a backward pass; see attention.Kernel.
func (c *Kernels) Backward(
	dq, do, q tensor.View, s attention.Saved, p attention.Softmax,
) (attention.BackwardPass, error) {
	if err := attention.CheckBackward(dq, do, q, s, p); err != nil {
		return nil, err
	}
	if err := computable("attention backward", append([]tensor.View{q, do, s.O, s.LSE, s.Delta, dq},
		views(p.Scores)...)...); err != nil {
		return nil, err
	}
	c.Zero(dq)
	if p.Scores != nil && !p.Scores.DBias.IsZero() {
		c.Zero(p.Scores.DBias)
	}
	c.queue("attention delta", func() { forType(q, rowDots[float64], rowDots[float32])(c, s.Delta, do, s.O) })
	c.Launch(fmt.Sprintf("cpu %v (%v)", q.DType(), c.level))
	c.backward = backwardPass{c, dq, do, q, s, p}
	return &c.backward, nil
}

// A backwardPass is a backward pass.
type backwardPass struct {
	c         *Kernels
	dq, do, q tensor.View
	s         attention.Saved
	p         attention.Softmax
}

// Block adds the gradients of a block.
func (f *backwardPass) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(f.do, f.q, b, f.p); err != nil {
		return err
	}
	if err := computable("attention backward", f.q, b.K, b.V, b.DK, b.DV); err != nil {
		return err
	}
	fresh := b.KeyGrads.Rows(b.Fresh.Lo, b.Fresh.Hi)
	f.c.Zero(fresh.DK, fresh.DV)
	if len(b.Tiles) == 0 {
		return nil
	}
	x := *f
	b.Tiles, b.Columns = slices.Clone(b.Tiles), slices.Clone(b.Columns)
	x.c.queue("attention backward", func() { forType(x.q, backward[float64], backward[float32])(&x, b) })
	return nil
}

// End does nothing, since Block adds gradients at once.
func (f *backwardPass) End() error { return nil }

// Fold adds gradients of keys from elsewhere.
func (f *backwardPass) Fold(x attention.Fold) error {
	if err := attention.CheckFold(x); err != nil {
		return err
	}
	dst := x.Dst.Rows(x.Lo, x.Lo+x.Src.DK.Len(tensor.Seq))
	if err := computable("attention fold", dst.DK, x.Src.DK, dst.DV, x.Src.DV); err != nil {
		return err
	}
	f.c.Add(dst.DK, x.Src.DK)
	f.c.Add(dst.DV, x.Src.DV)
	return nil
}

var _ attention.Kernel = (*Kernels)(nil)

// computable returns an error unless all views are in host memory and either all float64 or all float32 or 16 bits.
func computable(what string, vs ...tensor.View) error {
	if err := onHost(what, vs...); err != nil {
		return err
	}
	for _, v := range vs {
		if t := v.DType(); (t == tensor.F64) != (vs[0].DType() == tensor.F64) || t != tensor.F64 && t != tensor.F32 &&
			!isHalf(t) {
			return fmt.Errorf("%s: element types %v and %v; the CPU computes float64 with float64 alone, and "+
				"float32, bfloat16 and float16 with each other",
				what, vs[0].DType(), t)
		}
	}
	return nil
}

func rowDots[T tensor.Float](c *Kernels, delta, do, o tensor.View) {
	d, x, y := rowsOf[T](delta), rowsOf[T](do), rowsOf[T](o)
	seq, heads, l := o.Len(tensor.Seq), o.Len(tensor.Heads), simd.LoopsOf[T](c.level)
	size := rowBlock(heads * x.dim)
	c.split(blocks(o.Rows(), size), func(s *scratch, n int) {
		mem := open[T](s, x.scratchLen(1), y.scratchLen(1))
		xs, ys := mem.take(x.scratchLen(1)), mem.take(y.scratchLen(1))
		for row := n * size; row < min((n+1)*size, o.Rows()); row++ {
			b, i := row/seq, row%seq
			for h := range heads {
				d.row(b, i, h)[0] = T(l.Dot(x.read(xs, b, i, h), y.read(ys, b, i, h)))
			}
		}
	})
}

// clip returns the part of t inside a block of queries and a block of keys, shrunk to the
// bounding box of its visible pairs. ok is false if there are none.
func clip(t partition.Tile, q, k partition.Range) (_ partition.Tile, ok bool) {
	t.Q = meet(meet(t.Q, q), partition.Range{Lo: max(t.K.Lo, k.Lo) - t.Band.Hi, Hi: min(t.K.Hi, k.Hi) - t.Band.Lo})
	t.K = meet(meet(t.K, k), partition.Range{Lo: t.Q.Lo + t.Band.Lo, Hi: t.Q.Hi + t.Band.Hi})
	return t, t.Q.Lo < t.Q.Hi && t.K.Lo < t.K.Hi && t.Band.Lo <= t.Band.Hi
}

func meet(a, b partition.Range) partition.Range {
	return partition.Range{Lo: max(a.Lo, b.Lo), Hi: min(a.Hi, b.Hi)}
}

// block returns the n-th piece of [0, length), split into pieces of size.
func block(n, size, length int) partition.Range {
	return partition.Range{Lo: n * size, Hi: min((n+1)*size, length)}
}

func blocks(length, size int) int { return (length + size - 1) / size }

// A forwardCall folds one block of keys. A piece of work is a block of queries of up to groupHeads query heads of one
// KV head; it owns their rows of O and LSE.
type forwardCall[T tensor.Float] struct {
	loops         simd.Loops[T]
	o, lse, q     rows[T]
	k, v          rows[T]
	tiles         []partition.Tile
	p             attention.Softmax
	scores        *scores[T] // nil: no bias and no largest scores
	group         int        // query heads per KV head
	heads         int        // heads of a piece
	queries       int        // queries of a piece
	chunks        int        // pieces of a group
	seqQ, kvHeads int
}

// A forwardBlock holds the state of one piece of work: FlashAttention-2 (arXiv:2307.08691),
// algorithm 1, started from acc.
type forwardBlock[T tensor.Float] struct {
	*forwardCall[T]
	b, g, h0, h1 int             // batch, KV head, query heads
	at           partition.Range // queries
	wide         int             // number of queries, padded
	ldo          int             // elements of a row of o

	q      []T         // for each head, panels of the transposed queries
	o      []T         // for each head, wide rows, not yet divided by sum
	top    []T         // for each head and query: the largest score so far
	sum    []float64   // for each head and query: sum of 2^(score - top)
	v      []T         // panels of the values
	narrow []T         // keys, and the packed operand, converted from 16 bits
	s      []T         // scores of a panel of queries
	shrink []T         // for each query: 2^(old top - new top)
	sees   [mostQ]bool // for each query: it sees some key of a tile
}

func forward[T tensor.Float](pass *forwardPass, b attention.Block) {
	q, k, v, tiles := pass.q, b.K, b.V, b.Tiles
	if q.Size() == 0 || k.Size() == 0 || v.Size() == 0 || len(tiles) == 0 {
		return
	}
	f := &forwardCall[T]{
		loops: simd.LoopsOf[T](pass.c.level), o: rowsOf[T](pass.acc.O), lse: rowsOf[T](pass.acc.LSE),
		q: rowsOf[T](q), k: rowsOf[T](k), v: rowsOf[T](v), tiles: tiles, p: pass.p,
		scores: scoresOf[T](pass.p.Scores, b.Columns),
		group:  q.Len(tensor.Heads) / k.Len(tensor.Heads), seqQ: q.Len(tensor.Seq), kvHeads: k.Len(tensor.Heads),
	}
	f.heads = min(groupHeads, f.group)
	f.chunks = blocks(f.group, f.heads)
	groups := q.Len(tensor.Batch) * f.kvHeads * f.chunks
	f.queries = queriesOf(groups, f.seqQ)
	pass.c.split(groups*blocks(f.seqQ, f.queries), func(s *scratch, i int) { f.piece(s, i) })
}

// leastPieces is the number of pieces above which a piece has two blocks of queries. Larger pieces load keys and pack
// values less often.
const leastPieces = 64

// queriesOf returns the number of queries of a piece. It depends only on the shape.
func queriesOf(groups, seq int) int {
	if groups*blocks(seq, mostQ) < leastPieces {
		return blockQ
	}
	return mostQ
}

// piece computes the n-th piece of work. The last queries come first, since under a causal mask they take longest.
func (f *forwardCall[T]) piece(s *scratch, n int) {
	per := f.kvHeads * f.chunks
	head := n % per
	n /= per
	nq := blocks(f.seqQ, f.queries)
	x := forwardBlock[T]{forwardCall: f, b: n / nq, g: head / f.chunks, at: block(nq-1-n%nq, f.queries, f.seqQ)}
	x.h0 = x.g*f.group + head%f.chunks*f.heads
	x.h1 = min(x.h0+f.heads, (x.g+1)*f.group)

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
		for i := t.Q.Lo; i < t.Q.Hi; i++ { // after clip, every query sees a key
			x.sees[i-x.at.Lo] = true
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

// begin loads the queries and the state: top = LSE and sum = 1. If LSE is -Inf, the first key shrinks that sum to 0.
func (x *forwardBlock[T]) begin(s *scratch) {
	heads, dim, dimV, l := x.h1-x.h0, x.forwardCall.q.dim, x.forwardCall.v.dim, x.loops
	x.wide, x.ldo = l.Padded(x.at.Len()), l.Padded(dimV)
	nq, no, ns := heads*x.wide*dim, heads*x.wide*x.ldo, heads*x.wide
	narrow := x.k.scratchLen(blockK) + max(x.forwardCall.q.scratchLen(x.queries), x.forwardCall.v.scratchLen(blockK))
	mem := open[T](s, nq, no, ns, blockK*x.ldo, blockK*l.Cols, l.Cols, narrow)
	x.q, x.o, x.top = mem.take(nq), mem.take(no), mem.take(ns)
	x.v, x.s, x.shrink = mem.take(blockK*x.ldo), mem.take(blockK*l.Cols), mem.take(l.Cols)
	x.narrow = mem.take(narrow)
	x.sum = s.sum[:]
	clear(x.o)
	none := T(math.Inf(-1))
	for h := x.h0; h < x.h1; h++ {
		at := (h - x.h0) * x.wide
		x.forwardCall.q.matrix(x.narrow, x.b, x.at, h).columns(l, x.q[at*dim:], scoreScale(x.p, x.scores))
		lse, lseStep := x.lse.from(x.b, x.at.Lo, h)
		o, oStep := x.forwardCall.o.from(x.b, x.at.Lo, h)
		for i := range x.wide {
			x.top[at+i], x.sum[at+i] = none, 1
			if i < x.at.Len() {
				x.top[at+i] = lse[i*lseStep] * log2e
				if x.top[at+i] != none { // otherwise the query has seen no key, and o is 0
					copy(x.o[(at+i)*x.ldo:], o[i*oStep:][:dimV])
				}
			}
		}
	}
}

// keys folds one tile of at most blockK keys, a panel of queries at a time.
func (x *forwardBlock[T]) keys(t partition.Tile) {
	keys := x.k.matrix(x.narrow, x.b, t.K, x.g)
	values := x.forwardCall.v.matrix(x.narrow[x.k.scratchLen(blockK):], x.b, t.K, x.g).panels(x.loops, x.v, t.K.Len())
	for h := range x.h1 - x.h0 {
		for lo := (t.Q.Lo - x.at.Lo) / x.loops.Cols * x.loops.Cols; x.at.Lo+lo < t.Q.Hi; lo += x.loops.Cols {
			first := x.at.Lo + lo
			if part, ok := clip(t, partition.Range{Lo: first, Hi: first + x.loops.Cols}, t.K); ok {
				values.From = part.K.Lo - t.K.Lo
				x.panel(h, lo, part, keys.left(values.From), values)
			}
		}
	}
}

// panel folds a tile inside the panel of queries that begins at column lo of the block.
func (x *forwardBlock[T]) panel(h, lo int, t partition.Tile, keys simd.Left[T], values simd.Right[T]) {
	l, dim, dimV := x.loops, x.forwardCall.q.dim, x.forwardCall.v.dim
	cols, n := min(l.Cols, x.wide-lo), t.K.Len()
	s := simd.Scores[T]{S: x.s, Ld: cols, Keys: n, Cols: cols}
	queries := simd.Right[T]{Panels: x.q[(h*x.wide+lo)*dim:], Rows: dim}
	l.Product(n, cols, dim, keys, queries, s.S, cols, simd.Set, nil)
	where := scoreTile[T]{s, t, x.b, x.h0 + h, x.at.Lo + lo}
	if x.p.Softcap > 0 {
		softcap(s, nil, x.p.Softcap)
	}
	x.scores.add(where)
	hide(l, where, T(math.Inf(-1)))
	x.scores.keep(where)
	if changed(x.p, x.scores) {
		s.Times(log2e)
	}
	row := h*x.wide + lo
	l.Softmax(s, x.top[row:], x.sum[row:], x.shrink)
	// The product leaves out queries of other tiles, which would get 0 * NaN. Their shrink is 1, or their row is still
	// 0.
	from := t.Q.Lo - where.first
	left := simd.Left[T]{A: s.S[from:], Ld: cols}
	l.Product(t.Q.Len(), dimV, n, left, values, x.o[(row+from)*x.ldo:], x.ldo, simd.ScaleAdd, x.shrink[from:])
}

// end divides by the sums and writes the state back.
func (x *forwardBlock[T]) end() {
	for h := x.h0; h < x.h1; h++ {
		lse, lseStep := x.lse.from(x.b, x.at.Lo, h)
		o, oStep := x.forwardCall.o.from(x.b, x.at.Lo, h)
		for i := range x.at.Len() {
			row := (h-x.h0)*x.wide + i
			top, sum := x.top[row], x.sum[row]
			if math.IsInf(float64(top), -1) && sum == sum { // if all scores are NaN, sum is NaN
				if !x.sees[i] || x.p.Scores.Hides() {
					continue // no key yet
				}
				sum = math.NaN()
			}
			lse[i*lseStep] = T((float64(top) + math.Log2(sum)) / log2e)
			x.loops.Scaled(o[i*oStep:][:x.forwardCall.v.dim], x.o[row*x.ldo:], T(1/sum))
		}
	}
}
