package comm

import (
	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/tensor"
)

// The ranks of a small group are joined pairwise, so its collectives are direct: each part goes
// from the rank that has it to the rank that needs it in one round of messages. That moves as few
// bytes as a ring does, in fewer steps, and a rank that stays away is met, and named, by everybody
// who waits for it and not by its neighbour alone. Those of a large group are in few.go.

const (
	// smallReduce bounds the vectors that an all-reduce sends whole, in one round.
	smallReduce = 16 << 10
	// smallBroadcast bounds the vectors that the root sends whole.
	smallBroadcast = 64 << 10
	// pieceBytes bounds the scratch memory of a reduction.
	pieceBytes = 4 << 20
)

// call queues f after the compute stream. The error is untyped if there is none.
func (g *Group) call(name, detail string, f func() error) (Pending, error) {
	p, err := g.enqueue(name, detail, true, f)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// detail returns a collective's text in traces: the bytes of all ranks' data, and the ranks.
func (g *Group) detail(v tensor.View) string {
	if !tensor.Tracing(g.stream) {
		return ""
	}
	return check.Collective(v, len(g.ranks))
}

func (g *Group) rules() check.Rules {
	return check.Rules{Rank: g.rank, Size: len(g.ranks), Memory: check.OnHost}
}

// Exchange sends and receives as one group.
func (g *Group) Exchange(send, recv []Message) (Pending, error) {
	if err := check.Exchange(g.rules(), send, recv); err != nil {
		return nil, g.fault("exchange", err)
	}
	sends, own := g.parts(send)
	recvs, into := g.parts(recv)
	detail := ""
	if tensor.Tracing(g.stream) {
		detail = check.Detail(send, recv)
	}
	return g.call("exchange", detail, func() error {
		for i := range own {
			copy(into[i], own[i])
		}
		return g.exchange(sends, recvs)
	})
}

// parts sorts out the messages of the own rank.
func (g *Group) parts(ms []Message) (parts []part, own [][]byte) {
	for _, m := range ms {
		if b := tensor.Bytes(m.View); m.Peer == g.rank {
			own = append(own, b)
		} else {
			parts = append(parts, part{m.Peer, b})
		}
	}
	return parts, own
}

// AllReduce combines v over the ranks, in place. Elements are combined in rank order, so the
// result does not depend on size or transport and is the same on every rank.
func (g *Group) AllReduce(v tensor.View, op Op) (Pending, error) {
	if err := g.rules().AllReduce(v, op); err != nil {
		return nil, g.fault("all-reduce", err)
	}
	b := tensor.Bytes(v)
	return g.call("all-reduce", g.detail(v), func() error {
		switch {
		case len(g.ranks) == 1:
			return nil
		case g.few():
			return g.allReduceFew(v.DType(), op, b)
		case len(b) <= smallReduce:
			return g.reduceWhole(v.DType(), op, b)
		}
		return pieces(len(b), v.DType().Size()*len(g.ranks), func(lo, hi int) error {
			return g.reducePiece(v.DType(), op, b[lo:hi])
		})
	})
}

// pieces calls f for ranges of at most about pieceBytes that are multiples of unit, except for
// the last.
func pieces(n, unit int, f func(lo, hi int) error) error {
	step := max(pieceBytes/unit, 1) * unit
	for lo := 0; lo < n; lo += step {
		if err := f(lo, min(lo+step, n)); err != nil {
			return err
		}
	}
	return nil
}

// others calls f for every rank but the own one, the next rank first, so that not all ranks
// begin with the same peer.
func (g *Group) others(f func(i, peer int)) {
	n := len(g.ranks)
	for i := range n - 1 {
		f(i, (g.rank+1+i)%n)
	}
}

// reduceWhole sends the whole vector to everybody.
func (g *Group) reduceWhole(d tensor.DType, op Op, b []byte) error {
	n := len(g.ranks)
	all := g.scratchBytes(n * padded(len(b)))
	slot := func(r int) []byte { return all[r*padded(len(b)):][:len(b)] }
	copy(slot(g.rank), b)
	sends, recvs := make([]part, n-1), make([]part, n-1)
	g.others(func(i, peer int) { sends[i], recvs[i] = part{peer, slot(g.rank)}, part{peer, slot(peer)} })
	if err := g.exchange(sends, recvs); err != nil {
		return err
	}
	combineAll(d, op, b, n, slot)
	return nil
}

// padded keeps the slots of the scratch memory aligned for every element type.
func padded(n int) int { return (n + 7) &^ 7 }

// share returns the range of elements, in bytes, that rank r reduces of n bytes.
func share(n, size, ranks, r int) (lo, hi int) {
	e := n / size
	return e * r / ranks * size, e * (r + 1) / ranks * size
}

// reducePiece has every rank reduce its share and send it to everybody.
func (g *Group) reducePiece(d tensor.DType, op Op, b []byte) error {
	n := len(g.ranks)
	of := func(r int) []byte {
		lo, hi := share(len(b), d.Size(), n, r)
		return b[lo:hi]
	}
	if err := g.reduceShares(d, op, of(g.rank), of); err != nil {
		return err
	}
	sends, recvs := make([]part, n-1), make([]part, n-1)
	g.others(func(i, peer int) { sends[i], recvs[i] = part{peer, of(g.rank)}, part{peer, of(peer)} })
	return g.exchange(sends, recvs)
}

// reduceShares sends of(r) to each rank r and combines what comes for this rank, its own
// share among it, in rank order into dst.
func (g *Group) reduceShares(d tensor.DType, op Op, dst []byte, of func(r int) []byte) error {
	n, own := len(g.ranks), of(g.rank)
	size := padded(len(own))
	all := g.scratchBytes(n * size)
	slot := func(r int) []byte {
		if r == g.rank {
			return own
		}
		return all[r*size:][:len(own)]
	}
	sends, recvs := make([]part, n-1), make([]part, n-1)
	g.others(func(i, peer int) { sends[i], recvs[i] = part{peer, of(peer)}, part{peer, slot(peer)} })
	if err := g.exchange(sends, recvs); err != nil {
		return err
	}
	combineAll(d, op, dst, n, slot)
	return nil
}

// AllGather fills dst with the ranks' src. src may be the own part of dst.
func (g *Group) AllGather(dst, src tensor.View) (Pending, error) {
	if err := g.rules().AllGather(dst, src); err != nil {
		return nil, g.fault("all-gather", err)
	}
	d, s := tensor.Bytes(dst), tensor.Bytes(src)
	return g.call("all-gather", g.detail(dst), func() error {
		copy(d[g.rank*len(s):], s)
		return g.gatherBlocks(d, len(s))
	})
}

// gatherBlocks fills all, blocks of that size in rank order, of which the own one is there.
func (g *Group) gatherBlocks(all []byte, size int) error {
	n := len(g.ranks)
	of := func(lo, hi int) []byte { return all[lo*size : hi*size] }
	if g.few() {
		return g.doubling(0, false, of)
	}
	sends, recvs := make([]part, n-1), make([]part, n-1)
	g.others(func(i, peer int) {
		sends[i], recvs[i] = part{peer, of(g.rank, g.rank+1)}, part{peer, of(peer, peer+1)}
	})
	return g.exchange(sends, recvs)
}

// ReduceScatter combines the ranks' src and leaves part Rank in dst, which may be that part
// of src.
func (g *Group) ReduceScatter(dst, src tensor.View, op Op) (Pending, error) {
	if err := g.rules().ReduceScatter(dst, src, op); err != nil {
		return nil, g.fault("reduce-scatter", err)
	}
	d, s := tensor.Bytes(dst), tensor.Bytes(src)
	return g.call("reduce-scatter", g.detail(src), func() error {
		if g.few() {
			return g.reduceScatterFew(dst.DType(), op, d, s)
		}
		unit, size := dst.DType().Size(), len(d)
		step := max(pieceBytes/len(g.ranks)/unit, 1) * unit
		for lo := 0; lo < size; lo += step {
			hi := min(lo+step, size)
			err := g.reduceShares(dst.DType(), op, d[lo:hi], func(r int) []byte { return s[r*size+lo : r*size+hi] })
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// Broadcast copies root's v to every rank. A large one goes out in parts that the ranks then
// pass on to each other (van de Geijn's scatter and all-gather), so that the root sends the
// data once and not once per rank.
func (g *Group) Broadcast(v tensor.View, root int) (Pending, error) {
	if err := g.rules().Broadcast(v, root); err != nil {
		return nil, g.fault("broadcast", err)
	}
	n, b := len(g.ranks), tensor.Bytes(v)
	return g.call("broadcast", g.detail(v), func() error {
		if g.few() {
			return g.broadcastFew(v.DType(), b, root)
		}
		if len(b) <= smallBroadcast || n <= 2 {
			return g.scatter(root, func(int) []byte { return b })
		}
		of := func(r int) []byte {
			lo, hi := share(len(b), v.DType().Size(), n, r)
			return b[lo:hi]
		}
		if err := g.scatter(root, of); err != nil {
			return err
		}
		// The root has everything already; it only passes on its own part.
		var sends, recvs []part
		g.others(func(_, peer int) {
			if peer != root {
				sends = append(sends, part{peer, of(g.rank)})
			}
			if g.rank != root {
				recvs = append(recvs, part{peer, of(peer)})
			}
		})
		return g.exchange(sends, recvs)
	})
}

func (g *Group) scatter(root int, of func(r int) []byte) error {
	if g.rank != root {
		return g.exchange(nil, []part{{root, of(g.rank)}})
	}
	var sends []part
	g.others(func(_, peer int) { sends = append(sends, part{peer, of(peer)}) })
	return g.exchange(sends, nil)
}
