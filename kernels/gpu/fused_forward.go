//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A fusedForward is a forward pass.
type fusedForward struct {
	f   *Fused
	o   View
	acc attention.Partial
	q   View
	p   attention.Softmax
}

// Forward begins a forward pass; see attention.Kernel. If o is dense, cuDNN writes its first result there. If that is
// the only result, the pass needs no other memory and no more work.
func (f *Fused) Forward(o View, acc attention.Partial, q View, p attention.Softmax) (attention.ForwardPass, error) {
	if err := attention.CheckForward(o, acc, q, p); err != nil {
		return nil, err
	}
	if err := f.usable(q, p, q, o, acc.O); err != nil {
		return nil, err
	}
	if t := o.DType(); t != tensor.F32 && t != q.DType() {
		return nil, fmt.Errorf("fused attention: o is %v, and q is %v; cuDNN gives it as %v, and sums are float32", t,
			q.DType(), q.DType())
	}
	f.keys, f.scratch.at = heldKeys{}, 0
	f.held = heldParts{dst: acc.O, lse: acc.LSE, fresh: true, dtype: q.DType()}
	if o.IsDense() {
		f.held.into = o
	}
	f.forward = fusedForward{f, o, acc, q, p}
	return &f.forward, nil
}

// Block computes the tiles with cuDNN and keeps the results.
func (x *fusedForward) Block(b attention.Block) error {
	if err := attention.CheckBlock(x.acc.O, x.q, b, x.p); err != nil {
		return err
	}
	if err := fusedAligned("fused attention", b.K, b.V); err != nil {
		return err
	}
	f, c := x.f, fusedCall{q: x.q, k: b.K, v: b.V, scale: x.p.Scale}
	groups, err := f.planned(&c, b.Tiles)
	if err != nil || len(groups) == 0 {
		return err
	}
	f.stream.Do("attention forward", func() error {
		for _, g := range groups {
			f.foldFull()
			if err := f.forwardGroup(&c, g); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

// End merges the held results into o and LSE in one pass over memory. It does not write acc.O, unless o is acc.O.
func (x *fusedForward) End() error {
	f, o, acc := x.f, x.o, x.acc
	f.stream.Do("attention finish", func() error {
		h := &f.held
		switch {
		case h.done(o):
			p := h.parts[0]
			f.kernels.copyLSE(f.stream, acc.LSE.Addr(), stridesOf(acc.LSE), p.lse, p.at, o.Len(tensor.Batch),
				o.Len(tensor.Seq), o.Len(tensor.Heads), false)
		case o != acc.O || len(h.parts) > 0 || h.fresh:
			f.kernels.mergeInto(f.stream, merging{o, acc.O, acc.LSE, h.dtype, h.parts, h.fresh, true})
		}
		f.held, f.scratch.at = heldParts{}, 0
		return nil
	})
	return nil
}

// foldFull folds the held parts if their number is at its limit.
func (f *Fused) foldFull() {
	if len(f.held.parts) >= maxHeld {
		f.fold()
	}
}

// A fusedCall holds the tensors of a block.
type fusedCall struct {
	q, k, v  View
	do       View // zero in a forward pass
	saved    attention.Saved
	dk, dv   View
	scale    float64
	backward bool
}

func (c *fusedCall) heads() int   { return c.q.Len(tensor.Heads) }
func (c *fusedCall) kvHeads() int { return c.k.Len(tensor.Heads) }
func (c *fusedCall) batch() int   { return c.q.Len(tensor.Batch) }
func (c *fusedCall) dim() int     { return c.q.Len(tensor.Dim) }
func (c *fusedCall) dimV() int    { return c.v.Len(tensor.Dim) }

// problem returns the common part of packed and single calls of cuDNN.
func (f *Fused) problem(c *fusedCall) dnn.Desc {
	return dnn.Desc{
		Backward: c.backward, Deterministic: c.backward && f.options.Deterministic, DType: c.q.DType(),
		Batch: c.batch(), Heads: c.heads(), KVHeads: c.kvHeads(), Dim: c.dim(), DimV: c.dimV(), Scale: c.scale,
	}
}

// piece returns the problem of one piece of a group.
func (f *Fused) piece(c *fusedCall, g *fusedGroup, p dnn.Piece) dnn.Desc {
	d := f.problem(c)
	d.SeqQ, d.SeqK, d.Mask = p.Q.Len(), p.K.Len(), p.Mask
	rows, keys := g.rows.Len(), p.K.Len()
	d.Strides[dnn.Q], d.Strides[dnn.K], d.Strides[dnn.V] = planStrides(seqRows(c.q, p.Q)), planStrides(seqRows(c.k,
		p.K)), planStrides(seqRows(c.v, p.K))
	d.Strides[dnn.Stats] = headsFirst(p.Q.Len(), c.heads())
	if !c.backward {
		d.Strides[dnn.O] = denseRows(rows, c.heads(), c.dimV())
		return d
	}
	d.Strides[dnn.O], d.Strides[dnn.DO] = planStrides(seqRows(c.saved.O, p.Q)), planStrides(seqRows(c.do, p.Q))
	d.Strides[dnn.DQ] = denseRows(rows, c.heads(), c.dim())
	d.Strides[dnn.DK], d.Strides[dnn.DV] = denseRows(keys, c.kvHeads(), c.dim()), denseRows(keys, c.kvHeads(), c.dimV())
	return d
}

func seqRows(v View, r partition.Range) View { return v.Slice(tensor.Seq, r.Lo, r.Hi) }

// planStrides returns the strides of v. The stride of an axis of length 1 becomes that of a dense tensor, so that equal
// problems share a plan.
func planStrides(v View) axisStrides {
	s := stridesOf(v)
	if v.Len(tensor.Heads) == 1 {
		s[2] = int64(v.Len(tensor.Dim))
	}
	if v.Len(tensor.Batch) == 1 {
		s[0] = max(int64(v.Len(tensor.Seq))*s[1], int64(v.Len(tensor.Heads))*s[2])
	}
	return s
}

// plans builds the plans of the group. Only this takes the host noticeable time.
func (f *Fused) plans(c *fusedCall, g *fusedGroup) error {
	if g.packed {
		_, err := f.dnn.Plan(f.packed(c, g))
		return err
	}
	for i, p := range g.pieces {
		g.pieces[i] = p.Widened(c.k.Len(tensor.Seq))
		if _, err := f.dnn.Plan(f.piece(c, g, g.pieces[i])); err != nil {
			return err
		}
	}
	return nil
}

// forwardGroup queues the calls of a group and keeps their result.
func (f *Fused) forwardGroup(c *fusedCall, g *fusedGroup) error {
	held, shared, err := f.place(c, g)
	if err != nil {
		return err
	}
	mark := f.scratch.at
	switch {
	case g.packed:
		err = f.forwardPacked(c, g, held)
	case len(g.pieces) == 1: // keep cuDNN's order of axes
		held.at = headsFirst(g.rows.Len(), c.heads())
		err = f.forwardPiece(c, g, g.pieces[0], held.x, held.lse)
	default:
		for _, p := range g.pieces {
			if err = f.forwardAmong(c, g, p, held); err != nil {
				break
			}
		}
	}
	f.scratch.at = mark
	if !shared {
		f.held.parts = append(f.held.parts, held)
	}
	return err
}

// forwardAmong computes one of several pieces of a part.
func (f *Fused) forwardAmong(c *fusedCall, g *fusedGroup, p dnn.Piece, held fusedPart) error {
	mark := f.scratch.at
	defer func() { f.scratch.at = mark }()
	rows, before := p.Q.Len(), p.Q.Lo-g.rows.Lo
	stats, err := f.scratch.alloc(int64(c.batch()*rows*c.heads()) * 4)
	if err != nil {
		return err
	}
	if err := f.forwardPiece(c, g, p, held.x+uint64(before*c.heads()*c.dimV()*2), stats); err != nil {
		return err
	}
	dst := held.lse + uint64(int64(before)*held.at[1]*4)
	f.kernels.copyLSE(f.stream, dst, held.at, stats, headsFirst(rows, c.heads()), c.batch(), rows, c.heads(), false)
	return nil
}

// forwardPiece calls cuDNN once. It writes O to x and the LSE, heads first, to lse.
func (f *Fused) forwardPiece(c *fusedCall, g *fusedGroup, p dnn.Piece, x, lse uint64) error {
	var at dnn.Pointers
	at[dnn.Q], at[dnn.K], at[dnn.V] = seqRows(c.q, p.Q).Addr(), seqRows(c.k, p.K).Addr(), seqRows(c.v, p.K).Addr()
	at[dnn.O], at[dnn.Stats] = x, lse
	return f.execute(f.piece(c, g, p), &at)
}

// execute runs a planned problem.
func (f *Fused) execute(d dnn.Desc, at *dnn.Pointers) error {
	plan, err := f.dnn.Plan(d)
	if err != nil {
		return err
	}
	mark := f.scratch.at
	workspace, err := f.scratch.alloc(plan.Workspace)
	if err != nil {
		return err
	}
	f.scratch.at = mark
	if d.Backward && f.options.ZeroWorkspace {
		f.stream.Memset(workspace, 0, plan.Workspace)
	}
	f.Launch(map[bool]string{false: "cudnn forward", true: "cudnn backward"}[d.Backward])
	return f.dnn.Execute(plan, at, workspace)
}

// A fusedBackward is a backward pass.
type fusedBackward struct {
	f         *Fused
	dq, do, q View
	s         attention.Saved
	p         attention.Softmax
}

// Backward begins a backward pass; see attention.Kernel. s.O must have the type of q. It does not use s.Delta, since
// cuDNN computes that itself.
func (f *Fused) Backward(dq, do, q View, s attention.Saved, p attention.Softmax) (attention.BackwardPass, error) {
	if err := attention.CheckBackward(dq, do, q, s, p); err != nil {
		return nil, err
	}
	if err := f.usable(q, p, q, do, s.O, dq); err != nil {
		return nil, err
	}
	if s.O.DType() != q.DType() || do.DType() != q.DType() {
		return nil, fmt.Errorf("fused attention backward: o is %v and do %v; cuDNN takes them as %v, the type of q",
			s.O.DType(), do.DType(), q.DType())
	}
	if err := call.FusedTrains(q, do, s.O); err != nil {
		return nil, err
	}
	f.keys, f.scratch.at = heldKeys{}, 0
	f.held = heldParts{dst: dq, fresh: true, dtype: q.DType()}
	f.backward = fusedBackward{f, dq, do, q, s, p}
	return &f.backward, nil
}

// Block computes the gradients of the tiles with cuDNN. It keeps dq, and adds dk and dv at once unless a fold follows.
func (x *fusedBackward) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(x.do, x.q, b, x.p); err != nil {
		return err
	}
	if err := fusedAligned("fused attention", b.K, b.V, b.DK, b.DV); err != nil {
		return err
	}
	f := x.f
	c := fusedCall{q: x.q, k: b.K, v: b.V, do: x.do, saved: x.s, dk: b.DK, dv: b.DV, scale: x.p.Scale, backward: true}
	groups, err := f.planned(&c, b.Tiles)
	if err != nil {
		return err
	}
	f.stream.Do("attention backward", func() error {
		f.flushKeys()
		sum := keySum{f: f, c: &c, hold: b.FoldNext, k: b.Fresh, v: b.Fresh}
		for i, g := range groups {
			f.foldFull()
			if err := f.backwardGroup(&c, g, &sum, i == len(groups)-1); err != nil {
				return err
			}
		}
		sum.zero()
		return nil
	})
	return nil
}

// End adds the held gradients to dq.
func (x *fusedBackward) End() error {
	f := x.f
	f.stream.Do("attention finish", func() error {
		f.flushKeys()
		f.fold()
		f.held, f.scratch.at = heldParts{}, 0
		return nil
	})
	return nil
}

// backwardGroup queues the calls of a group. last marks the last group of the block.
func (f *Fused) backwardGroup(c *fusedCall, g *fusedGroup, sum *keySum, last bool) error {
	if f.held.stats.at == 0 { // memory for all rows, which later calls reuse
		at, err := f.scratch.alloc(int64(c.batch()*c.q.Len(tensor.Seq)*c.heads()) * 4)
		if err != nil {
			return err
		}
		f.held.stats.at, f.held.base = at, f.scratch.at
	}
	bytes := int64(c.batch()*g.rows.Len()*c.heads()*c.dim()) * 2
	dq, err := f.scratch.alloc(bytes)
	if err != nil {
		return err
	}
	f.holdGrad(c, g, dq, bytes)
	mark := f.scratch.at
	defer func() { f.scratch.at = mark }()
	if g.packed {
		return f.backwardPacked(c, g, dq, sum, last)
	}
	for i, p := range g.pieces {
		f.scratch.at = mark
		at := dq + uint64((p.Q.Lo-g.rows.Lo)*c.heads()*c.dim()*2)
		if err := f.backwardPiece(c, g, p, at, sum, last && i == len(g.pieces)-1); err != nil {
			return err
		}
	}
	return nil
}

// holdGrad keeps a group's gradients at dq: one part for each run of its rows, or, if that is too many or the batch is
// larger than one, a single part with zeros between the runs.
func (f *Fused) holdGrad(c *fusedCall, g *fusedGroup, dq uint64, bytes int64) {
	runs := []partition.Range{g.rows}
	if g.gaps() {
		if own := g.runs(); c.batch() == 1 && len(f.held.parts)+len(own) <= source.FusedMaxParts {
			runs = own
		} else {
			f.stream.Memset(dq, 0, bytes)
		}
	}
	for _, r := range runs {
		at := dq + uint64(int64(r.Lo-g.rows.Lo)*int64(c.heads()*c.dim())*2)
		f.held.parts = append(f.held.parts, fusedPart{x: at, lo: r.Lo, hi: r.Hi})
	}
}

// backwardPiece calls cuDNN once and adds its gradients of k and v.
func (f *Fused) backwardPiece(c *fusedCall, g *fusedGroup, p dnn.Piece, dq uint64, sum *keySum, last bool) error {
	dk, dv, err := f.keyGrads(c, p.K.Len())
	if err != nil {
		return err
	}
	var at dnn.Pointers
	at[dnn.Q], at[dnn.K], at[dnn.V] = seqRows(c.q, p.Q).Addr(), seqRows(c.k, p.K).Addr(), seqRows(c.v, p.K).Addr()
	at[dnn.O], at[dnn.DO] = seqRows(c.saved.O, p.Q).Addr(), seqRows(c.do, p.Q).Addr()
	at[dnn.Stats] = f.stats(c, p.Q, headsFirst(p.Q.Len(), c.heads()))
	at[dnn.DQ], at[dnn.DK], at[dnn.DV] = dq, dk, dv
	if err := f.execute(f.piece(c, g, p), &at); err != nil {
		return err
	}
	sum.add(dk, dv, p.K, last)
	return nil
}

func (f *Fused) keyGrads(c *fusedCall, keys int) (dk, dv uint64, err error) {
	n := int64(c.batch()*keys*c.kvHeads()) * 2
	if dk, err = f.scratch.alloc(n * int64(c.dim())); err != nil {
		return 0, 0, err
	}
	dv, err = f.scratch.alloc(n * int64(c.dimV()))
	return dk, dv, err
}

// stats returns the LSE of rows r with the strides at. It reuses the copy of the previous call if that is the same.
func (f *Fused) stats(c *fusedCall, r partition.Range, at axisStrides) uint64 {
	s := &f.held.stats
	if s.src != c.saved.LSE || s.lo != r.Lo || s.hi != r.Hi || s.order != at {
		src := seqRows(c.saved.LSE, r)
		f.kernels.copyLSE(f.stream, s.at, at, src.Addr(), stridesOf(src), c.batch(), r.Len(), c.heads(), true)
		s.src, s.lo, s.hi, s.order = c.saved.LSE, r.Lo, r.Hi, at
	}
	return s.at
}
