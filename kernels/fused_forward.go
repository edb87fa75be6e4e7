//go:build cuda

package kernels

import (
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/cuda/dnn"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// Forward has cuDNN compute the tiles and holds the results back; see attention.Kernel.
func (f *Fused) Forward(acc attention.Partial, q, k, v View, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckForward(acc, q, k, v, tiles, p); err != nil {
		return err
	}
	if err := f.usable(q, p, q, k, v, acc.O); err != nil {
		return err
	}
	c := fusedCall{q: q, k: k, v: v, scale: p.Scale}
	groups := f.grouped(&c, tiles)
	for _, g := range groups {
		if err := f.plans(&c, g); err != nil {
			return err
		}
	}
	if len(groups) == 0 {
		return nil
	}
	f.stream.Do("attention forward", func() error {
		f.settleKeys()
		f.hold(acc.O, acc.LSE)
		for _, g := range groups {
			f.room(q.DType())
			if err := f.forward(&c, g); err != nil {
				return err
			}
		}
		return nil
	})
	return nil
}

// room folds what is held where there is no room for another part of that type.
func (f *Fused) room(t tensor.DType) {
	h := &f.held
	if len(h.parts) == maxHeld || len(h.parts) > 0 && h.dtype != t {
		f.fold()
	}
	h.dtype = t
}

// fusedCall is the tensors of a call of Forward or Backward.
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

// problem is what the two ways of calling cuDNN have in common.
func (f *Fused) problem(c *fusedCall) dnn.Desc {
	return dnn.Desc{
		Backward: c.backward, Deterministic: c.backward && f.options.Deterministic, DType: c.q.DType(),
		Batch: c.batch(), Heads: c.heads(), KVHeads: c.kvHeads(), Dim: c.dim(), DimV: c.dimV(), Scale: c.scale,
	}
}

// piece is the problem of one piece of a group.
func (f *Fused) piece(c *fusedCall, g *fusedGroup, p dnn.Piece) dnn.Desc {
	d := f.problem(c)
	d.SeqQ, d.SeqK, d.Mask = p.Q.Len(), p.K.Len(), p.Mask
	rows, keys := g.rows.Len(), p.K.Len()
	d.Strides[dnn.Q], d.Strides[dnn.K], d.Strides[dnn.V] = planStrides(seqRows(c.q, p.Q)), planStrides(seqRows(c.k, p.K)), planStrides(seqRows(c.v, p.K))
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

// planStrides are the strides of v; that of a batch of one is what it would be without gaps, so
// that equal problems have equal plans.
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

// plans builds what the group needs. It is all that takes the host any time.
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

// forward queues the calls of a group and holds their result.
func (f *Fused) forward(c *fusedCall, g *fusedGroup) error {
	rows := g.rows.Len()
	x, err := f.place(c, g)
	if err != nil {
		return err
	}
	n := c.batch() * rows * c.heads()
	lse, err := f.scratch.alloc(int64(n) * 4)
	if err != nil {
		return err
	}
	held := fusedPart{x: x, lse: lse, at: denseRows(rows, c.heads(), 1), lo: g.rows.Lo, hi: g.rows.Hi, gaps: g.gaps()}
	if held.gaps {
		f.kernels.fill32(f.stream, lse, n, math.Inf(-1))
	}
	mark := f.scratch.at
	switch {
	case g.packed:
		err = f.forwardPacked(c, g, held)
	case len(g.pieces) == 1: // cuDNN's order of axes is as good as any
		held.at = headsFirst(rows, c.heads())
		err = f.forwardPiece(c, g, g.pieces[0], held.x, held.lse)
	default:
		for _, p := range g.pieces {
			if err = f.forwardAmong(c, g, p, held); err != nil {
				break
			}
		}
	}
	f.scratch.at = mark
	f.held.parts = append(f.held.parts, held)
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

// forwardPiece is one call of cuDNN: O goes to x, the LSE, heads first, to lse.
func (f *Fused) forwardPiece(c *fusedCall, g *fusedGroup, p dnn.Piece, x, lse uint64) error {
	var at dnn.Pointers
	at[dnn.Q], at[dnn.K], at[dnn.V] = cuda.Addr(seqRows(c.q, p.Q)), cuda.Addr(seqRows(c.k, p.K)), cuda.Addr(seqRows(c.v, p.K))
	at[dnn.O], at[dnn.Stats] = x, lse
	return f.execute(f.piece(c, g, p), &at)
}

// execute runs a problem that has a plan.
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
	return f.dnn.Execute(plan, at, workspace)
}
