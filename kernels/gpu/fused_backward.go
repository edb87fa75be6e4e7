//go:build cuda

package gpu

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// A fusedBackward is a backward pass.
type fusedBackward struct {
	f         *Fused
	dq, do, q View
	s         attention.Saved
	p         attention.Softmax
}

// Backward begins a backward pass; see attention.Kernel. s.O is of the type of q; s.Delta is left
// alone, since cuDNN computes it itself.
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
	f.keys, f.scratch.at = heldKeys{}, 0
	f.held = heldParts{dst: dq, fresh: true, dtype: q.DType()}
	f.backward = fusedBackward{f, dq, do, q, s, p}
	return &f.backward, nil
}

// Block has cuDNN compute the gradients of the tiles. Those of k and v are added at once, unless a
// fold follows, those of q held back.
func (x *fusedBackward) Block(b attention.GradBlock) error {
	if err := attention.CheckGradBlock(x.do, x.q, b, x.p); err != nil {
		return err
	}
	if err := fusedAligned("fused attention", b.K, b.V, b.DK, b.DV); err != nil {
		return err
	}
	f := x.f
	c := fusedCall{q: x.q, k: b.K, v: b.V, do: x.do, saved: x.s, dk: b.DK, dv: b.DV, scale: x.p.Scale, backward: true}
	groups := f.grouped(&c, b.Tiles)
	for _, g := range groups {
		if err := f.plans(&c, g); err != nil {
			return err
		}
	}
	f.stream.Do("attention backward", func() error {
		f.settleKeys()
		sum := keySum{f: f, c: &c, hold: b.FoldNext, k: b.Fresh, v: b.Fresh}
		for i, g := range groups {
			f.room()
			if err := f.backwardGroup(&c, g, &sum, i == len(groups)-1); err != nil {
				return err
			}
		}
		sum.zero()
		return nil
	})
	return nil
}

// End sums all that is held into dq.
func (x *fusedBackward) End() error {
	f := x.f
	f.stream.Do("attention finish", func() error {
		f.settleKeys()
		f.fold()
		f.held, f.scratch.at = heldParts{}, 0
		return nil
	})
	return nil
}

// backwardGroup queues the calls of a group. last says that no group follows in this block.
func (f *Fused) backwardGroup(c *fusedCall, g *fusedGroup, sum *keySum, last bool) error {
	if f.held.stats.at == 0 { // of the whole block, so that it is there for every call to come
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

// holdGrad holds a group's gradients at dq: a part for each run of its rows, or one part with zeros between if there is
// no place for that many or a batch element's rows are not contiguous.
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

// backwardPiece makes one call of cuDNN, and adds its gradients of k and v.
func (f *Fused) backwardPiece(c *fusedCall, g *fusedGroup, p dnn.Piece, dq uint64, sum *keySum, last bool) error {
	dk, dv, err := f.keyGrads(c, p.K.Len())
	if err != nil {
		return err
	}
	var at dnn.Pointers
	at[dnn.Q], at[dnn.K], at[dnn.V] = cuda.Addr(seqRows(c.q, p.Q)), cuda.Addr(seqRows(c.k, p.K)), cuda.Addr(seqRows(c.v,
		p.K))
	at[dnn.O], at[dnn.DO] = cuda.Addr(seqRows(c.saved.O, p.Q)), cuda.Addr(seqRows(c.do, p.Q))
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

// stats returns the LSE of rows r with the strides at, copied where it was not for the call before.
func (f *Fused) stats(c *fusedCall, r partition.Range, at axisStrides) uint64 {
	s := &f.held.stats
	if s.src != c.saved.LSE || s.lo != r.Lo || s.hi != r.Hi || s.order != at {
		src := seqRows(c.saved.LSE, r)
		f.kernels.copyLSE(f.stream, s.at, at, cuda.Addr(src), stridesOf(src), c.batch(), r.Len(), c.heads(), true)
		s.src, s.lo, s.hi, s.order = c.saved.LSE, r.Lo, r.Hi, at
	}
	return s.at
}
