package cpu

import (
	"errors"
	"slices"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/kernels/cpu/internal/simd"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Delta returns the kernel of the gated delta rule, which queues its work on the stream.
func (c *Kernels) Delta() delta.Kernel { return deltaKernel{c} }

type deltaKernel struct{ c *Kernels }

// Summarize sets Maps; see delta.Kernel.
func (k deltaKernel) Summarize(a delta.Args) error { return k.queue("delta summarize", a) }

// Forward sets O; see delta.Kernel.
func (k deltaKernel) Forward(a delta.Args) error { return k.queue("delta forward", a) }

// SummarizeBackward sets DMaps; see delta.Kernel.
func (k deltaKernel) SummarizeBackward(a delta.Args) error {
	return k.queue("delta summarize backward", a)
}

// Backward sets the gradients; see delta.Kernel.
func (k deltaKernel) Backward(a delta.Args) error { return k.queue("delta backward", a) }

// Compose composes maps, or applies them to states; see delta.Kernel.
func (k deltaKernel) Compose(dst, later, earlier tensor.View) error {
	if err := delta.CheckCompose(dst, later, earlier); err != nil {
		return err
	}
	if err := onHost("delta compose", dst, later, earlier); err != nil {
		return err
	}
	k.c.queue("delta compose", func() {
		forType(dst, composeDelta[float64], composeDelta[float32])(k.c, dst, later, earlier)
	})
	return nil
}

func composeDelta[T tensor.Float](c *Kernels, dst, later, earlier tensor.View) {
	l, to, x, y := simd.LoopsOf[T](c.level), rowsOf[T](dst), rowsOf[T](later), rowsOf[T](earlier)
	heads, dim, ld := later.Len(tensor.Seq), later.Len(tensor.Heads), l.Padded(y.dim)
	c.split(later.Len(tensor.Batch)*heads, func(s *scratch, i int) {
		n, h := i/heads, i%heads
		mem := open[T](s, dim*ld, dim*ld)
		sum, panels := mem.take(dim*ld), mem.take(dim*ld)
		clear(sum)
		for r := range dim {
			copy(sum[r*ld+y.dim-(x.dim-dim):], x.row(n, h, r)[dim:])
		}
		l.Pack(panels, y.data[at(earlier, n, h, 0):], int(earlier.Stride(tensor.Heads)), dim, y.dim, dim)
		m := simd.Left[T]{A: x.data[at(later, n, h, 0):], Ld: int(later.Stride(tensor.Heads)), Rows: true}
		l.Product(dim, y.dim, dim, m, simd.Right[T]{Panels: panels, Rows: dim}, sum, ld, simd.Add, nil)
		for r := range dim {
			copy(to.row(n, h, r), sum[r*ld:])
		}
	})
}

func (k deltaKernel) queue(op string, a delta.Args) error {
	a, err := a.Check(op)
	if err != nil {
		return err
	}
	for _, v := range a.Views() {
		if !v.IsZero() {
			err = errors.Join(err, onHost(op, *v))
		}
	}
	if err != nil {
		return err
	}
	a.Segments, a.Entered, a.Followed = slices.Clone(a.Segments), slices.Clone(a.Entered), slices.Clone(a.Followed)
	k.c.queue(op, func() { forType(a.Q, runDelta[float64], runDelta[float32])(k.c, op, a) })
	return nil
}

// runDelta computes a call, for each segment, sample and key head.
func runDelta[T tensor.Float](c *Kernels, op string, a delta.Args) {
	run := map[string]func(*deltaPiece[T]){
		"delta summarize": (*deltaPiece[T]).summarize, "delta summarize backward": (*deltaPiece[T]).summarizeBackward,
		"delta forward": (*deltaPiece[T]).forward, "delta backward": (*deltaPiece[T]).backward,
	}[op]
	x := deltaPiece[T]{args: &a, loops: simd.LoopsOf[T](c.level), scale: T(a.Scale),
		dim: a.K.Len(tensor.Dim), dimV: a.V.Len(tensor.Dim), group: a.V.Len(tensor.Heads) / a.K.Len(tensor.Heads)}
	x.wideK, x.wideV = x.loops.Padded(x.dim), x.loops.Padded(x.dimV)
	x.wide = x.wideV + x.wideK
	views := a.Views()
	for i, to := range []*rows[T]{&x.of.q, &x.of.k, &x.of.v, &x.of.g, &x.of.beta, &x.of.do, &x.of.state, &x.of.dstate,
		&x.of.maps, &x.of.dmaps, &x.of.o, &x.of.dq, &x.of.dk, &x.of.dv, &x.of.dg, &x.of.dbeta} {
		if !views[i].IsZero() {
			*to = rowsOf[T](*views[i])
		}
	}
	batch, keyHeads := a.Q.Len(tensor.Batch), a.K.Len(tensor.Heads)
	c.split(len(a.Segments)*batch*keyHeads, func(s *scratch, i int) {
		x := x
		x.scratch, x.n, x.keyHead = s, i/keyHeads, i%keyHeads
		x.b, x.segment = x.n%batch, a.Segments[x.n/batch]
		run(&x)
	})
}

// A deltaPiece is a piece of work: a segment of one sample and key head, whose value heads share products, and whose
// gradients of q and k are sums in the order of the value heads. It holds the matrices of a chunk, in the parallel form
// of the rule (arXiv:2412.06464, section 3.3). D(i, j) is the decay from row j to row i: the exponential of a sum of g
// over these rows alone, so that a large g does not round other decays.
//
//	A = beta_i k_i.k_j D(i, j) for j < i;   T = inverse of 1 + A;   P = scale q_i.k_j D(i, j) for j <= i
//	U | W = T (beta_i v_i | -beta_i D(i, before) k_i);   E = U + W S
//	o = scale D(i, before) q S + P E;   S' = D(last, before) S + (D(last, i) k_i)' E
type deltaPiece[T tensor.Float] struct {
	*scratch
	loops simd.Loops[T]
	of    struct{ q, k, v, g, beta, do, state, dstate, maps, dmaps, o, dq, dk, dv, dg, dbeta rows[T] }
	scale T
	args  *delta.Args

	dim, dimV, wideK, wideV, wide int   // columns of k and v, padded, and their sum
	width                         int   // columns of a state, padded: those of v, then those of M in a map
	group, n, b, keyHead, h       int   // value heads, index of the map, sample, and heads
	states                        [][]T // [dim, width] each
	segment, at                   partition.Range
	rows                          int // of the chunk, which begins at at.Lo

	q, k, v, do             matrix[T]
	narrow                  [4][]T // these, converted from 16 bits
	qk, kk, decay, p, t     []T    // products of rows of q and k, D(i, j), P and T
	beta, into, scaled, out []T    // beta, D(i, before), with the scale, and D(last, i)
	whole                   []T    // D(last, before), for each row of a state
	right, uw               []T    // T's right factor, and U | W
	keys, queries           []T    // D(last, i) k_i, and scale D(i, before) q_i
	errors, derrors         []T    // E, and its gradient
	panels, doPanels, sum   []T    // packed factors, and the result of one product
	duw, dright, dqk, dkk   []T    // gradients; dkk is symmetric
	dq, dk                  []T    // sums over value heads
}

// open takes the memory of all matrices and of states, which have so many columns. A map begins as 0 | I.
func (x *deltaPiece[T]) open(width, states int) {
	const c = delta.Chunk
	x.width, x.states = width, make([][]T, states)
	most, total := max(c, x.wideK, x.wideV), 0
	pieces := []struct {
		n  int
		of []*[]T
	}{
		{c * c, []*[]T{&x.qk, &x.kk, &x.decay, &x.p, &x.t, &x.dqk, &x.dkk}},
		{c * x.wide, []*[]T{&x.right, &x.uw, &x.duw, &x.dright}},
		{c * x.wideK, []*[]T{&x.keys, &x.queries, &x.dq, &x.dk}},
		{c * x.width, []*[]T{&x.errors, &x.derrors}},
		{c * most, []*[]T{&x.doPanels, &x.sum, &x.narrow[0], &x.narrow[1], &x.narrow[2], &x.narrow[3]}},
		{most * max(c, x.wide), []*[]T{&x.panels}},
		{most, []*[]T{&x.beta, &x.into, &x.scaled, &x.out, &x.whole}},
	}
	for _, p := range pieces {
		total += len(p.of) * roundUp(p.n, pieceUnit)
	}
	mem := open[T](x.scratch, total, states*roundUp(x.dim*x.width, pieceUnit))
	for _, p := range pieces {
		for _, m := range p.of {
			*m = mem.take(p.n)
		}
	}
	clear(x.right) // padding remains 0
	for i := range x.states {
		x.states[i] = mem.take(x.dim * x.width)
		clear(x.states[i])
		for r := 0; r < x.dim && width > x.wideV; r++ {
			x.states[i][r*width+x.wideV+r] = 1
		}
	}
}

func (x *deltaPiece[T]) summarize() {
	x.open(x.wide, x.group)
	for c := range x.chunks() {
		x.chunk(c, func(i int) { x.step(x.states[i], false) })
	}
	x.storeMaps(x.of.maps)
}

func (x *deltaPiece[T]) forward() {
	x.open(x.wideV, x.group)
	x.loadStates(x.states, x.of.state, x.args.Entered)
	for c := range x.chunks() {
		x.chunk(c, func(i int) { x.step(x.states[i], true) })
	}
}

func (x *deltaPiece[T]) summarizeBackward() {
	x.open(x.wide, x.group)
	for c := x.chunks() - 1; c >= 0; c-- {
		x.chunk(c, func(i int) {
			x.errorGrads(x.states[i])
			x.stateGrads(x.states[i])
		})
	}
	x.storeMaps(x.of.dmaps)
}

// backward keeps the state before each chunk.
func (x *deltaPiece[T]) backward() {
	group := x.group
	x.open(x.wideV, group*(x.chunks()+1))
	grads, before := x.states[:group], x.states[group:] // [chunk, head]
	x.loadStates(grads, x.of.dstate, x.args.Followed)
	x.loadStates(before, x.of.state, x.args.Entered)
	for c := range x.chunks() - 1 {
		x.chunk(c, func(i int) {
			next := before[(c+1)*group+i]
			copy(next, before[c*group+i])
			x.step(next, false)
		})
	}
	for c := x.chunks() - 1; c >= 0; c-- {
		clear(x.dq)
		clear(x.dk)
		x.chunk(c, func(i int) {
			x.setErrors(before[c*group+i])
			x.errorGrads(grads[i])
			x.inputGrads(before[c*group+i], grads[i])
			x.stateGrads(grads[i])
		})
		for i := range x.rows {
			x.store(x.of.dq, i, x.keyHead, x.dq[i*x.wideK:][:x.dim])
			x.store(x.of.dk, i, x.keyHead, x.dk[i*x.wideK:][:x.dim])
		}
	}
}

func (x *deltaPiece[T]) chunks() int { return blocks(x.segment.Len(), delta.Chunk) }

// loadStates loads the states of the listed segments. Those of others remain 0.
func (x *deltaPiece[T]) loadStates(to [][]T, from rows[T], list []int) {
	batch := x.args.Q.Len(tensor.Batch)
	n, found := slices.BinarySearch(list, x.n/batch)
	for i := 0; found && i < x.group; i++ {
		for r := range x.dim {
			copy(to[i][r*x.width:], from.row(n*batch+x.b, x.keyHead*x.group+i, r))
		}
	}
}

// storeMaps writes the states as maps, without padding.
func (x *deltaPiece[T]) storeMaps(maps rows[T]) {
	for i, s := range x.states {
		for r := range x.dim {
			to := maps.row(x.n, x.keyHead*x.group+i, r)
			copy(to[copy(to[:x.dim], s[r*x.width+x.wideV:]):], s[r*x.width:])
		}
	}
}

// store writes row i of the chunk.
func (x *deltaPiece[T]) store(to rows[T], i, h int, row []T) {
	to.store(int(at(to.view, x.b, x.at.Lo+i, h)), row)
}

// row returns row i of a matrix.
func (m matrix[T]) row(i int) []T { return m.data[i*m.ld:][:m.dim] }

// mul sets c, m by n, to the product of a and a packed matrix, or adds it, or scales c first.
func (x *deltaPiece[T]) mul(c []T, ld, m, n int, a simd.Left[T], b simd.Right[T], mode simd.Mode, scale []T) {
	x.loops.Product(m, n, b.Rows, a, b, c, ld, mode, scale)
}

// down returns a matrix as a left factor, and across its transpose.
func down[T tensor.Float](m []T, ld int) simd.Left[T]   { return simd.Left[T]{A: m, Ld: ld, Rows: true} }
func across[T tensor.Float](m []T, ld int) simd.Left[T] { return simd.Left[T]{A: m, Ld: ld} }

// pack packs a matrix as a right factor, and packAcross its transpose. The next one replaces it.
func (x *deltaPiece[T]) pack(m []T, ld, rows, cols int) simd.Right[T] {
	return matrix[T]{m, ld, rows, cols}.panels(x.loops, x.panels, rows)
}

func (x *deltaPiece[T]) packAcross(m []T, ld, rows, cols int) simd.Right[T] {
	return matrix[T]{m, ld, rows, cols}.columns(x.loops, x.panels, 1)
}

// chunk prepares the c-th chunk and calls f for each value head of the group.
func (x *deltaPiece[T]) chunk(c int, f func(i int)) {
	lo := x.segment.Lo + c*delta.Chunk
	x.at = partition.Range{Lo: lo, Hi: min(lo+delta.Chunk, x.segment.Hi)}
	x.rows = x.at.Len()
	x.q = x.of.q.matrix(x.narrow[0], x.b, x.at, x.keyHead)
	x.k = x.of.k.matrix(x.narrow[1], x.b, x.at, x.keyHead)
	keys := x.packAcross(x.k.data, x.k.ld, x.rows, x.k.dim)
	x.mul(x.qk, delta.Chunk, x.rows, x.rows, x.q.left(0), keys, simd.Set, nil)
	x.mul(x.kk, delta.Chunk, x.rows, x.rows, x.k.left(0), keys, simd.Set, nil)
	for i := range x.group {
		x.h = x.keyHead*x.group + i
		x.v = x.of.v.matrix(x.narrow[2], x.b, x.at, x.h)
		x.decays()
		x.invert()
		x.solve()
		f(i)
	}
}

// decays sets beta, the decays and P.
func (x *deltaPiece[T]) decays() {
	const c = delta.Chunk
	var sums, exps [c + 1]T // of g, from before the chunk and from each of its rows
	for i := range x.rows {
		x.beta[i] = x.of.beta.row(x.b, x.at.Lo+i, x.h)[0]
		g := x.of.g.row(x.b, x.at.Lo+i, x.h)[0]
		for j := range i + 1 {
			sums[j] += g
		}
		x.loops.ExpSum(exps[:i+2], sums[:i+2], 0)
		x.into[i], x.scaled[i] = exps[0], exps[0]*x.scale
		p := x.p[i*c:][:c]
		clear(p)
		for j, decay := range exps[1 : i+2] {
			x.decay[i*c+j], p[j] = decay, x.scale*x.qk[i*c+j]*decay
		}
	}
	copy(x.out, exps[1:])
	for i := range x.whole {
		x.whole[i] = exps[0]
	}
}

// invert sets T by forward substitution: row i is that of 1, minus the sum of A(i, j) times row j. The rows before it
// are packed.
func (x *deltaPiece[T]) invert() {
	const c = delta.Chunk
	cols := x.loops.Cols
	var a, sum [c]T
	for i := range x.rows {
		for j := range i {
			a[j] = -x.beta[i] * x.kk[i*c+j] * x.decay[i*c+j]
		}
		if i > 0 {
			x.loops.Product(1, roundUp(i, cols), i, down(a[:], c), simd.Right[T]{Panels: x.panels, Rows: c}, sum[:], c,
				simd.Set, nil)
		}
		row := x.t[i*c:][:c]
		clear(row[copy(row, sum[:i]):])
		row[i] = 1
		for j := 0; j < c; j += cols {
			copy(x.panels[j*c+i*cols:][:cols], row[j:])
		}
	}
}

// solve sets U | W and the decayed keys.
func (x *deltaPiece[T]) solve() {
	l := x.loops
	for i := range x.rows {
		row := x.right[i*x.wide:][:x.wide]
		l.Scaled(row[:x.dimV], x.v.row(i), x.beta[i])
		l.Scaled(row[x.wideV:][:x.dim], x.k.row(i), -x.beta[i]*x.into[i])
		l.Scaled(x.keys[i*x.wideK:][:x.dim], x.k.row(i), x.out[i])
	}
	right := x.pack(x.right, x.wide, x.rows, x.wide)
	x.mul(x.uw, x.wide, x.rows, x.wide, down(x.t, delta.Chunk), right, simd.Set, nil)
}

// setErrors sets E and returns the packed state.
func (x *deltaPiece[T]) setErrors(s []T) simd.Right[T] {
	for i := range x.rows {
		row := x.errors[i*x.width:][:x.width]
		clear(row[copy(row, x.uw[i*x.wide:][:x.wideV]):])
	}
	state := x.pack(s, x.width, x.dim, x.width)
	x.mul(x.errors, x.width, x.rows, x.width, down(x.uw[x.wideV:], x.wide), state, simd.Add, nil)
	return state
}

// step takes a state through the chunk, and sets o if out.
func (x *deltaPiece[T]) step(s []T, out bool) {
	state := x.setErrors(s)
	if out {
		x.mul(x.sum, x.wideV, x.rows, x.dimV, x.q.left(0), state, simd.Set, nil)
	}
	packed := x.pack(x.errors, x.width, x.rows, x.width)
	if out {
		x.mul(x.sum, x.wideV, x.rows, x.dimV, down(x.p, delta.Chunk), packed, simd.ScaleAdd, x.scaled)
		for i := range x.rows {
			x.store(x.of.o, i, x.h, x.sum[i*x.wideV:][:x.dimV])
		}
	}
	x.mul(s, x.width, x.dim, x.width, across(x.keys, x.wideK), packed, simd.ScaleAdd, x.whole)
}

// errorGrads sets the gradient of E, given that of the state after the chunk.
func (x *deltaPiece[T]) errorGrads(ds []T) {
	x.do = x.of.do.matrix(x.narrow[3], x.b, x.at, x.h)
	state := x.pack(ds, x.width, x.dim, x.width)
	x.mul(x.derrors, x.width, x.rows, x.width, down(x.keys, x.wideK), state, simd.Set, nil)
	do := x.do.panels(x.loops, x.doPanels, x.rows)
	x.mul(x.derrors, x.width, x.rows, x.dimV, across(x.p, delta.Chunk), do, simd.Add, nil)
}

// stateGrads takes ds to the gradient of the state before the chunk.
func (x *deltaPiece[T]) stateGrads(ds []T) {
	for i := range x.rows {
		x.loops.Scaled(x.queries[i*x.wideK:][:x.dim], x.q.row(i), x.scaled[i])
	}
	x.mul(ds, x.width, x.dim, x.width, across(x.uw[x.wideV:], x.wide), x.pack(x.derrors, x.width, x.rows, x.width),
		simd.ScaleAdd, x.whole)
	do := simd.Right[T]{Panels: x.doPanels, Rows: x.rows}
	x.mul(ds, x.width, x.dim, x.dimV, across(x.queries, x.wideK), do, simd.Add, nil)
}

// inputGrads adds to the gradients of q and k, and sets those of v, g and beta, given the state before the chunk and
// the gradient of the state after it. decays are gradients of the sum of g up to each row, in float64, since terms of
// both signs cancel.
func (x *deltaPiece[T]) inputGrads(s, ds []T) {
	l, n := x.loops, x.rows
	var decays, betas [delta.Chunk]float64
	decays[n-1] = float64(x.whole[0]) * l.Dot(s, ds)
	// add adds row i of sum, times scale, to a gradient, and returns its product with the row of q or k.
	add := func(to []T, i int, row []T, scale T, with matrix[T]) float64 {
		l.Scaled(row, row, scale)
		to = to[i*x.wideK:][:x.dim]
		l.AddTo(to, to, row)
		return l.Dot(row, with.row(i))
	}

	state := x.packAcross(s, x.width, x.dim, x.dimV)
	x.mul(x.duw[x.wideV:], x.wide, n, x.dim, down(x.derrors, x.width), state, simd.Set, nil)
	x.mul(x.sum, x.wideK, n, x.dim, x.do.left(0), state, simd.Set, nil)
	for i := range n { // scale D(i, before) q S in o
		copy(x.duw[i*x.wide:][:x.wideV], x.derrors[i*x.width:])
		decays[i] += add(x.dq, i, x.sum[i*x.wideK:][:x.dim], x.scaled[i], x.q)
	}
	x.mul(x.sum, x.wideK, n, x.dim, down(x.errors, x.width), x.packAcross(ds, x.width, x.dim, x.dimV), simd.Set, nil)
	for i := range n { // (D(last, i) k_i)' E in the next state
		y := add(x.dk, i, x.sum[i*x.wideK:][:x.dim], x.out[i], x.k)
		decays[i] -= y
		decays[n-1] += y
	}
	x.mul(x.dright, x.wide, n, x.wide, across(x.t, delta.Chunk), x.pack(x.duw, x.wide, n, x.wide), simd.Set, nil)
	x.pairGrads(&decays, &betas)
	for i := range n { // beta_i v_i | -beta_i D(i, before) k_i, T's right factor
		dv, dk := x.dright[i*x.wide:][:x.dimV], x.dright[i*x.wide+x.wideV:][:x.dim]
		betas[i] += l.Dot(dv, x.v.row(i)) - float64(x.into[i])*l.Dot(dk, x.k.row(i))
		decays[i] += add(x.dk, i, dk, -x.beta[i]*x.into[i], x.k)
		l.Scaled(dv, dv, x.beta[i])
		x.store(x.of.dv, i, x.h, dv)
	}
	sum := 0.0
	for i := n - 1; i >= 0; i-- {
		sum += decays[i]
		x.of.dg.row(x.b, x.at.Lo+i, x.h)[0] = T(sum)
		x.of.dbeta.row(x.b, x.at.Lo+i, x.h)[0] = T(betas[i])
	}
}

// pairGrads adds the gradients by way of P and A, products of rows. The gradient of A is that of T's right factor times
// -(U | W)'.
func (x *deltaPiece[T]) pairGrads(decays, betas *[delta.Chunk]float64) {
	const c = delta.Chunk
	n := x.rows
	x.mul(x.dqk, c, n, n, x.do.left(0), x.packAcross(x.errors, x.width, n, x.dimV), simd.Set, nil)
	x.mul(x.dkk, c, n, n, down(x.dright, x.wide), x.packAcross(x.uw, x.wide, n, x.wide), simd.Set, nil)
	for i := range n {
		dqk, dkk := x.dqk[i*c:][:n], x.dkk[i*c:][:n]
		for j := range i {
			p, a := dqk[j]*x.decay[i*c+j]*x.scale, -dkk[j]*x.decay[i*c+j]
			betas[i] += float64(a * x.kk[i*c+j])
			a *= x.beta[i]
			y := float64(p*x.qk[i*c+j]) + float64(a*x.kk[i*c+j])
			decays[i] += y
			decays[j] -= y
			dqk[j], dkk[j], x.dkk[j*c+i] = p, a, a
		}
		dqk[i] *= x.scale
		dkk[i] = 0
		clear(dqk[i+1:])
	}
	keys := x.pack(x.k.data, x.k.ld, n, x.dim)
	x.mul(x.dq, x.wideK, n, x.dim, down(x.dqk, c), keys, simd.Add, nil)
	x.mul(x.dk, x.wideK, n, x.dim, down(x.dkk, c), keys, simd.Add, nil)
	x.mul(x.dk, x.wideK, n, x.dim, across(x.dqk, c), x.pack(x.q.data, x.q.ld, n, x.dim), simd.Add, nil)
}
