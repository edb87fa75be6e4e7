package comm

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"github.com/cprun/cprun/comm/internal/check"
	"github.com/cprun/cprun/tensor"
)

// The ranks of a small group are connected pairwise, so its collectives are direct: each part goes from its owner to
// its reader in one round of messages. That moves as few bytes as a ring, in fewer steps, and all ranks that wait for
// an absent rank can name it. few.go has the collectives of large groups.

const (
	// smallReduce bounds the vectors that an all-reduce sends whole, in one round.
	smallReduce = 16 << 10
	// smallBroadcast bounds the vectors that the root sends whole.
	smallBroadcast = 64 << 10
	// pieceBytes bounds the scratch memory of a reduction.
	pieceBytes = 4 << 20
)

// detail returns a collective's text in traces: the bytes of all ranks' data, and the ranks.
func (g *Group) detail(v tensor.View) string {
	if !g.stream.Traced() {
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
	if g.stream.Traced() {
		detail = check.Detail(send, recv)
	}
	return g.enqueue("exchange", detail, true, func() error {
		for i := range own {
			copy(into[i], own[i])
		}
		return g.exchange(sends, recvs)
	})
}

// parts separates the messages of the own rank.
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

// Barrier blocks the caller until every rank has called it. It comes after the group's
// earlier calls; the compute stream has no part in it.
func (g *Group) Barrier(ctx context.Context) error {
	return Finish(ctx)(g.enqueue("barrier", "", false, func() error {
		if g.few() {
			return g.disseminate()
		}
		empty := func(int) []byte { return nil }
		return g.swap(empty, empty)
	}))
}

// AllReduce combines v over the ranks, in place. Elements are combined in rank order, so the
// result does not depend on size or transport and is the same on every rank.
func (g *Group) AllReduce(v tensor.View, op Op) (Pending, error) {
	if err := g.rules().AllReduce(v, op); err != nil {
		return nil, g.fault("all-reduce", err)
	}
	b := tensor.Bytes(v)
	return g.enqueue("all-reduce", g.detail(v), true, func() error {
		switch {
		case len(g.ranks) == 1:
			return nil
		case g.few():
			return g.allReduceFew(v.DType(), op, b)
		case len(b) <= smallReduce:
			return g.reduceShares(v.DType(), op, b, func(int) []byte { return b })
		}
		return pieces(len(b), pieceBytes, v.DType().Size()*len(g.ranks), func(lo, hi int) error {
			return g.reducePiece(v.DType(), op, b[lo:hi])
		})
	})
}

// pieces calls f for ranges of n bytes: multiples of unit, except the last, and of about most bytes.
func pieces(n, most, unit int, f func(lo, hi int) error) error {
	step := max(most/unit, 1) * unit
	for lo := 0; lo < n; lo += step {
		if err := f(lo, min(lo+step, n)); err != nil {
			return err
		}
	}
	return nil
}

// others calls f for every other rank, the next rank first, so that the ranks begin with different peers.
func (g *Group) others(f func(peer int)) {
	for i := 1; i < len(g.ranks); i++ {
		f(g.around(g.rank, i))
	}
}

// swap sends out(p) to each other rank p, and fills in(p) from it.
func (g *Group) swap(out, in func(peer int) []byte) error {
	sends, recvs := make([]part, 0, len(g.ranks)), make([]part, 0, len(g.ranks))
	g.others(func(peer int) {
		sends, recvs = append(sends, part{peer, out(peer)}), append(recvs, part{peer, in(peer)})
	})
	return g.exchange(sends, recvs)
}

// reducePiece makes every rank reduce its share and send it to all others.
func (g *Group) reducePiece(d tensor.DType, op Op, b []byte) error {
	of := func(r int) []byte { return share(b, d.Size(), len(g.ranks), r, r+1) }
	if err := g.reduceShares(d, op, of(g.rank), of); err != nil {
		return err
	}
	return g.swap(func(int) []byte { return of(g.rank) }, of)
}

// reduceShares sends of(r) to each rank r, and combines the ranks' data for this rank, its own included, in rank order
// into dst.
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
	if err := g.swap(of, slot); err != nil {
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
	return g.enqueue("all-gather", g.detail(dst), true, func() error {
		copy(d[g.rank*len(s):], s)
		return g.gatherBlocks(d, len(s))
	})
}

// gatherBlocks fills all, blocks of that size in rank order, from the ranks' own blocks.
func (g *Group) gatherBlocks(all []byte, size int) error {
	if g.few() {
		return g.doubling(0, false, func(lo, hi int) []byte { return all[lo*size : hi*size] })
	}
	block := func(r int) []byte { return all[r*size : (r+1)*size] }
	return g.swap(func(int) []byte { return block(g.rank) }, block)
}

// ReduceScatter combines the ranks' src and leaves part Rank in dst, which may be that part
// of src.
func (g *Group) ReduceScatter(dst, src tensor.View, op Op) (Pending, error) {
	if err := g.rules().ReduceScatter(dst, src, op); err != nil {
		return nil, g.fault("reduce-scatter", err)
	}
	d, s := tensor.Bytes(dst), tensor.Bytes(src)
	return g.enqueue("reduce-scatter", g.detail(src), true, func() error {
		if g.few() {
			return g.reduceScatterFew(dst.DType(), op, d, s)
		}
		size := len(d)
		return pieces(size, pieceBytes/len(g.ranks), dst.DType().Size(), func(lo, hi int) error {
			return g.reduceShares(dst.DType(), op, d[lo:hi], func(r int) []byte { return s[r*size+lo : r*size+hi] })
		})
	})
}

// Broadcast copies root's v to every rank. The root scatters a large v, and the ranks gather it (van de Geijn), so that
// the root sends the data once and not once per rank.
func (g *Group) Broadcast(v tensor.View, root int) (Pending, error) {
	if err := g.rules().Broadcast(v, root); err != nil {
		return nil, g.fault("broadcast", err)
	}
	n, b := len(g.ranks), tensor.Bytes(v)
	return g.enqueue("broadcast", g.detail(v), true, func() error {
		if g.few() {
			return g.broadcastFew(v.DType(), b, root)
		}
		if len(b) <= smallBroadcast || n <= 2 {
			return g.scatter(root, func(int) []byte { return b })
		}
		of := func(r int) []byte { return share(b, v.DType().Size(), n, r, r+1) }
		if err := g.scatter(root, of); err != nil {
			return err
		}
		var sends, recvs []part // the root sends only its own part
		g.others(func(peer int) {
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
	g.others(func(peer int) { sends = append(sends, part{peer, of(peer)}) })
	return g.exchange(sends, nil)
}

// Split makes groups of the ranks with the same colour, ordered by key, then by rank.
func (g *Group) Split(ctx context.Context, colour, key int) (Communicator, error) {
	c, err := g.Subgroup(ctx, colour, key, g.compute)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Subgroup splits like Split, for callers that need a *Group. Its calls are ordered against compute; nil: a private
// stream.
func (g *Group) Subgroup(ctx context.Context, colour, key int, compute tensor.Stream) (*Group, error) {
	n := len(g.ranks)
	all := make([]int64, 2*n)
	all[2*g.rank], all[2*g.rank+1] = int64(colour), int64(key)
	g.mu.Lock()
	g.splits++
	count := g.splits
	g.mu.Unlock()
	err := Finish(ctx)(g.enqueue("split", "", false, func() error {
		buf := tensor.FromSlice(all, 1, n, 1, 2)
		b := tensor.Bytes(buf)
		if err := g.gatherBlocks(b, len(b)/n); err != nil {
			return err
		}
		copy(all, tensor.Data[int64](buf))
		return nil
	}))
	if err != nil {
		return nil, err
	}
	var ranks []int // of this group, then of the world
	for r := range n {
		if int(all[2*r]) == colour {
			ranks = append(ranks, r)
		}
	}
	slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(all[2*a+1], all[2*b+1]) })
	own := slices.Index(ranks, g.rank)
	for i, r := range ranks {
		ranks[i] = g.ranks[r]
	}
	return g.adopt(newGroup(g.link, splitID(g.id, count, colour), ranks, own, compute, g.Options()))
}

// splitID derives the id of a sub-group from values that all its members have. Ids are 64 bits of a hash, so that two
// groups of a world do not collide.
func splitID(parent, count uint64, colour int) uint64 {
	var b [24]byte
	binary.BigEndian.PutUint64(b[0:], parent)
	binary.BigEndian.PutUint64(b[8:], count)
	binary.BigEndian.PutUint64(b[16:], uint64(int64(colour)))
	sum := sha256.Sum256(b[:])
	return max(binary.BigEndian.Uint64(sum[:8]), worldID+1)
}
