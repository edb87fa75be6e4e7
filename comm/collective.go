package comm

import (
	"fmt"

	"github.com/cprun/cprun/internal/tensor"
)

// Ranks are joined pairwise, so the collectives are direct: each part goes from the rank
// that has it to the rank that needs it in one round of messages. That moves as few bytes
// as a ring does, in fewer steps, and a rank that stays away is met, and named, by everybody
// who waits for it and not by its neighbour alone.

const (
	// smallReduce is the size up to which an all-reduce sends whole vectors in one round.
	smallReduce = 16 << 10
	// smallBroadcast is the size up to which the root sends whole copies.
	smallBroadcast = 64 << 10
	// pieceBytes bounds the scratch memory of a reduction.
	pieceBytes = 4 << 20
)

// call queues f behind the compute stream. The error is untyped where there is none.
func (g *Group) call(name string, f func() error) (Pending, error) {
	p, err := g.enqueue(name, true, f)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Exchange sends and receives as one group.
func (g *Group) Exchange(send, recv []Message) (Pending, error) {
	sends, own, err := g.parts("send", send)
	if err != nil {
		return nil, g.fault("exchange", err)
	}
	recvs, into, err := g.parts("receive", recv)
	if err != nil {
		return nil, g.fault("exchange", err)
	}
	if len(own) != len(into) {
		return nil, g.fault("exchange", fmt.Errorf("%d messages to the own rank, %d from it", len(own), len(into)))
	}
	for i := range own {
		if len(own[i]) != len(into[i]) {
			return nil, g.fault("exchange", fmt.Errorf("message %d to the own rank has %d bytes, it is received into %d", i, len(own[i]), len(into[i])))
		}
	}
	return g.call("exchange", func() error {
		for i := range own {
			copy(into[i], own[i])
		}
		return g.exchange(sends, recvs)
	})
}

// parts checks messages and sorts out those of the own rank.
func (g *Group) parts(verb string, ms []Message) (parts []part, own [][]byte, err error) {
	for i, m := range ms {
		if m.Peer < 0 || m.Peer >= len(g.ranks) {
			return nil, nil, fmt.Errorf("%s %d names rank %d of a group of %d", verb, i, m.Peer, len(g.ranks))
		}
		b, err := bytesOf(fmt.Sprintf("the view of %s %d (rank %d)", verb, i, m.Peer), m.View)
		if err != nil {
			return nil, nil, err
		}
		if m.Peer == g.rank {
			own = append(own, b)
		} else {
			parts = append(parts, part{m.Peer, b})
		}
	}
	return parts, own, nil
}

// AllReduce combines v over the ranks, in place. Elements are combined in rank order, so the
// result does not depend on size or transport and is the same on every rank.
func (g *Group) AllReduce(v View, op Op) (Pending, error) {
	b, err := bytesOf("the view", v)
	if err == nil {
		err = checkReduce(v, op)
	}
	if err != nil {
		return nil, g.fault("all-reduce", err)
	}
	return g.call("all-reduce", func() error {
		switch {
		case len(g.ranks) == 1:
			return nil
		case len(b) <= smallReduce:
			return g.reduceWhole(v.DType(), op, b)
		}
		return pieces(len(b), v.DType().Size()*len(g.ranks), func(lo, hi int) error {
			return g.reducePiece(v.DType(), op, b[lo:hi])
		})
	})
}

// pieces calls f for ranges of at most about pieceBytes that are multiples of unit, but for
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
	copy(b, slot(0))
	for r := 1; r < n; r++ {
		combine(d, op, b, slot(r))
	}
	return nil
}

// padded keeps the slots of the scratch memory aligned for every element type.
func padded(n int) int { return (n + 7) &^ 7 }

// share is the range of elements, in bytes, that rank r reduces of n bytes.
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
	slot := func(r int) []byte { return all[r*size:][:len(own)] }
	sends, recvs := make([]part, n-1), make([]part, n-1)
	g.others(func(i, peer int) { sends[i], recvs[i] = part{peer, of(peer)}, part{peer, slot(peer)} })
	if err := g.exchange(sends, recvs); err != nil {
		return err
	}
	if g.rank > 0 { // rank 0's share comes first, and dst may be the own share
		copy(slot(g.rank), own)
		copy(dst, slot(0))
	} else {
		copy(dst, own)
	}
	for r := 1; r < n; r++ {
		combine(d, op, dst, slot(r))
	}
	return nil
}

// AllGather fills dst with the ranks' src. src may be the own part of dst.
func (g *Group) AllGather(dst, src View) (Pending, error) {
	d, s, err := g.pair(dst, src)
	if err == nil {
		err = checkParts("dst", dst, "src", src, len(g.ranks))
	}
	if err == nil {
		err = checkInPlace("dst", dst, "src", src, g.rank)
	}
	if err != nil {
		return nil, g.fault("all-gather", err)
	}
	return g.call("all-gather", func() error {
		n, size := len(g.ranks), len(s)
		copy(d[g.rank*size:][:size], s)
		sends, recvs := make([]part, n-1), make([]part, n-1)
		g.others(func(i, peer int) { sends[i], recvs[i] = part{peer, s}, part{peer, d[peer*size:][:size]} })
		return g.exchange(sends, recvs)
	})
}

func (g *Group) pair(dst, src View) (d, s []byte, err error) {
	if d, err = bytesOf("dst", dst); err != nil {
		return nil, nil, err
	}
	s, err = bytesOf("src", src)
	return d, s, err
}

// ReduceScatter combines the ranks' src and leaves part Rank in dst, which may be that part
// of src.
func (g *Group) ReduceScatter(dst, src View, op Op) (Pending, error) {
	d, s, err := g.pair(dst, src)
	if err == nil {
		err = checkParts("src", src, "dst", dst, len(g.ranks))
	}
	if err == nil {
		err = checkInPlace("src", src, "dst", dst, g.rank)
	}
	if err == nil {
		err = checkReduce(src, op)
	}
	if err != nil {
		return nil, g.fault("reduce-scatter", err)
	}
	return g.call("reduce-scatter", func() error {
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

// AllToAll sends part p of src to rank p and fills part p of dst from rank p.
func (g *Group) AllToAll(dst, src View) (Pending, error) {
	n := len(g.ranks)
	d, s, err := g.pair(dst, src)
	if err == nil {
		err = checkAllToAll(dst, src, n)
	}
	if err == nil && spanOf(dst).overlaps(spanOf(src)) {
		err = errOverlap
	}
	if err != nil {
		return nil, g.fault("all-to-all", err)
	}
	return g.call("all-to-all", func() error {
		size := len(s) / n
		copy(d[g.rank*size:][:size], s[g.rank*size:])
		sends, recvs := make([]part, n-1), make([]part, n-1)
		g.others(func(i, peer int) {
			sends[i], recvs[i] = part{peer, s[peer*size:][:size]}, part{peer, d[peer*size:][:size]}
		})
		return g.exchange(sends, recvs)
	})
}

// Broadcast copies root's v to every rank. A large one goes out in parts that the ranks then
// pass on to each other (van de Geijn's scatter and all-gather), so that the root sends the
// data once and not once per rank.
func (g *Group) Broadcast(v View, root int) (Pending, error) {
	n := len(g.ranks)
	b, err := bytesOf("the view", v)
	if err == nil {
		err = checkRoot(root, n)
	}
	if err != nil {
		return nil, g.fault("broadcast", err)
	}
	return g.call("broadcast", func() error {
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

// scatter sends of(r) from root to every rank r.
func (g *Group) scatter(root int, of func(r int) []byte) error {
	if g.rank != root {
		return g.exchange(nil, []part{{root, of(g.rank)}})
	}
	var sends []part
	g.others(func(_, peer int) { sends = append(sends, part{peer, of(peer)}) })
	return g.exchange(sends, nil)
}
