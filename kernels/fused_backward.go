//go:build cuda

package kernels

import (
	"fmt"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/cuda/dnn"
	"github.com/cprun/cprun/internal/tensor"
	"github.com/cprun/cprun/partition"
)

// Backward has cuDNN compute the gradients of the tiles. Those of k and v are added to acc at
// once, those of q held back; see attention.Kernel. s.O is of the type of q.
func (f *Fused) Backward(acc attention.Grads, do, q, k, v View, s attention.Saved, tiles []partition.Tile, p attention.Softmax) error {
	if err := attention.CheckBackward(acc, do, q, k, v, s, tiles, p); err != nil {
		return err
	}
	if err := f.usable(q, p, q, k, v, do, s.O, acc.DQ, acc.DK, acc.DV); err != nil {
		return err
	}
	if s.O.DType() != q.DType() || do.DType() != q.DType() {
		return fmt.Errorf("fused attention backward: o is %v and do %v; cuDNN takes them as %v, the type of q", s.O.DType(), do.DType(), q.DType())
	}
	c := fusedCall{q: q, k: k, v: v, do: do, saved: s, dk: acc.DK, dv: acc.DV, scale: p.Scale, backward: true}
	groups := f.grouped(&c, tiles)
	for _, g := range groups {
		if err := f.plans(&c, g); err != nil {
			return err
		}
	}
	f.stream.Do("attention backward", func() error {
		f.settleKeys()
		sum := keySum{f: f, c: &c, hold: f.holds(acc), k: f.take(acc.DK), v: f.take(acc.DV)}
		f.hold(acc.DQ, View{})
		for i, g := range groups {
			f.room(q.DType())
			if err := f.backward(&c, g, &sum, i == len(groups)-1); err != nil {
				return err
			}
		}
		f.zero(acc.DK, sum.k)
		f.zero(acc.DV, sum.v)
		return nil
	})
	return nil
}

// backward queues the calls of a group. last says that no group follows in this call.
func (f *Fused) backward(c *fusedCall, g *fusedGroup, sum *keySum, last bool) error {
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
	if g.gaps() {
		f.stream.Memset(dq, 0, bytes)
	}
	mark := f.scratch.at
	defer func() { f.scratch.at = mark }()
	f.held.parts = append(f.held.parts, fusedPart{x: dq, lo: g.rows.Lo, hi: g.rows.Hi})
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

// backwardPiece is one call of cuDNN, and what it gives for k and v added.
func (f *Fused) backwardPiece(c *fusedCall, g *fusedGroup, p dnn.Piece, dq uint64, sum *keySum, last bool) error {
	dk, dv, err := f.keyGrads(c, p.K.Len())
	if err != nil {
		return err
	}
	var at dnn.Pointers
	at[dnn.Q], at[dnn.K], at[dnn.V] = cuda.Addr(seqRows(c.q, p.Q)), cuda.Addr(seqRows(c.k, p.K)), cuda.Addr(seqRows(c.v, p.K))
	at[dnn.O], at[dnn.DO] = cuda.Addr(seqRows(c.saved.O, p.Q)), cuda.Addr(seqRows(c.do, p.Q))
	at[dnn.Stats] = f.stats(c, p.Q, headsFirst(p.Q.Len(), c.heads()))
	at[dnn.DQ], at[dnn.DK], at[dnn.DV] = dq, dk, dv
	if err := f.execute(f.piece(c, g, p), &at); err != nil {
		return err
	}
	sum.add(dk, dv, p.K, last)
	return nil
}

// keyGrads is room for dK and dV of so many keys.
func (f *Fused) keyGrads(c *fusedCall, keys int) (dk, dv uint64, err error) {
	n := int64(c.batch()*keys*c.kvHeads()) * 2
	if dk, err = f.scratch.alloc(n * int64(c.dim())); err != nil {
		return 0, 0, err
	}
	dv, err = f.scratch.alloc(n * int64(c.dimV()))
	return dk, dv, err
}

// stats is the LSE of rows r with the strides at, copied where it was not for the call before.
func (f *Fused) stats(c *fusedCall, r partition.Range, at axisStrides) uint64 {
	s := &f.held.stats
	if s.src != c.saved.LSE || s.lo != r.Lo || s.hi != r.Hi || s.order != at {
		src := seqRows(c.saved.LSE, r)
		f.kernels.copyLSE(f.stream, s.at, at, cuda.Addr(src), stridesOf(src), c.batch(), r.Len(), c.heads(), true)
		s.src, s.lo, s.hi, s.order = c.saved.LSE, r.Lo, r.Hi, at
	}
	return s.at
}

// keySum adds gradients of k and v to the accumulators of a call. k and v are the rows of these
// that have not been written yet. With hold, the last ones are held back.
type keySum struct {
	f    *Fused
	c    *fusedCall
	hold bool
	k, v rowInterval
}

// add adds dk and dv, dense, of those keys. With last, it also sets to 0 what is not written
// by then.
func (s *keySum) add(dk, dv uint64, keys partition.Range, last bool) {
	k, v := s.total(s.c.dk, &s.k, dk, keys, last), s.total(s.c.dv, &s.v, dv, keys, last)
	if last && s.hold {
		s.f.keys = heldKeys{dtype: s.c.q.DType(), k: k, v: v}
		return
	}
	s.f.kernels.total(s.f.stream, s.c.q.DType(), k, v)
}

func (s *keySum) total(dst View, fresh *rowInterval, x uint64, keys partition.Range, last bool) gradTotal {
	t := gradTotal{dst: dst, parts: []fusedPart{{x: x, lo: keys.Lo, hi: keys.Hi}}, lo: keys.Lo, hi: keys.Hi}
	if fresh.len() == 0 {
		return t
	}
	switch {
	case last:
		t.lo, t.hi, t.fresh = min(t.lo, fresh.lo), max(t.hi, fresh.hi), *fresh
		*fresh = rowInterval{}
	case fresh.lo < keys.Hi && keys.Lo < fresh.hi: // what is before the keys is written, too
		t.lo, t.fresh = min(t.lo, fresh.lo), rowInterval{fresh.lo, min(fresh.hi, keys.Hi)}
		*fresh = rowInterval{keys.Hi, max(fresh.hi, keys.Hi)}
	}
	return t
}
