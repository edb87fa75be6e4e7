package comm

import (
	"math/bits"

	"github.com/cprun/cprun/tensor"
)

// Collectives of groups that are too large for connections between all pairs. A rank exchanges only with ranks at
// distances of powers of two (link.Neighbours). Results are bit-equal to those of the direct form, since sums are also
// made in rank order.
//
// If a rank is absent, the others wait for ranks that wait themselves, and find it at the end of that chain
// (blame.Stalled). No chain is a circle: in every form below a rank waits for a rank with less progress.

const (
	// gatherReduce bounds all ranks' vectors together for which each rank gathers them and combines them itself: at
	// most 2·log2 n steps; a chain takes 2n.
	gatherReduce = 1 << 20
	// minPiece and maxPiece bound the pieces that go along a chain. Smaller ones cost more steps than they save
	// waiting, larger ones more memory than they save steps.
	minPiece = 64 << 10
	maxPiece = 1 << 20
)

// few reports whether the group's collectives use only few neighbours.
func (g *Group) few() bool { return g.link.Few(len(g.ranks)) }

// around returns the rank at that distance from rank, backwards if it is negative.
func (g *Group) around(rank, distance int) int {
	n := len(g.ranks)
	return ((rank+distance)%n + n) % n
}

// disseminate returns when every rank has called it: after step k a rank depends on 2^(k+1) ranks.
func (g *Group) disseminate() error {
	for d := 1; d < len(g.ranks); d *= 2 {
		if err := g.exchange([]part{{peer: g.around(g.rank, d)}}, []part{{peer: g.around(g.rank, -d)}}); err != nil {
			return err
		}
	}
	return nil
}

// doubling completes every rank's n blocks; each begins with its own. In step k it has 2^k and gets as many again
// (Bruck et al. 1997). Block i belongs to the i-th rank from first, and span returns the memory of blocks lo to hi-1.
// full: rank first has all blocks.
func (g *Group) doubling(first int, full bool, span func(lo, hi int) []byte) error {
	n := len(g.ranks)
	own := g.around(g.rank, -first)
	for have := 1; have < n; have *= 2 {
		count := min(have, n-have)
		var sends, recvs []part
		if !full || own != have { // the receiver is not rank first
			sends = blocks(g.around(g.rank, -have), own, count, n, span)
		}
		if !full || own != 0 {
			recvs = blocks(g.around(g.rank, have), own+have, count, n, span)
		}
		if err := g.exchange(sends, recvs); err != nil {
			return err
		}
	}
	return nil
}

// blocks returns the messages of count blocks from block at, in a ring of n.
func blocks(peer, at, count, n int, span func(lo, hi int) []byte) []part {
	at %= n
	if at+count <= n {
		return []part{{peer, span(at, at+count)}}
	}
	return []part{{peer, span(at, n)}, {peer, span(0, at+count-n)}}
}

// tree sends blocks from root down a binomial tree, whose edges have distances of powers of two. Each rank gets its own
// blocks and those of all ranks below it; blocks and span are as in doubling.
func (g *Group) tree(root int, span func(lo, hi int) []byte) error {
	n := len(g.ranks)
	own := g.around(g.rank, -root)
	reach := own & -own // the number of ranks here and below
	if own == 0 {
		reach = 1 << bits.Len(uint(n-1))
	} else if err := g.exchange(nil, []part{{g.around(g.rank, -reach), span(own, min(own+reach, n))}}); err != nil {
		return err
	}
	var sends []part
	for d := reach / 2; d > 0; d /= 2 {
		if own+d < n {
			sends = append(sends, part{g.around(g.rank, d), span(own+d, min(own+2*d, n))})
		}
	}
	return g.exchange(sends, nil)
}

// broadcastFew copies root's b to every rank. A large b goes out in parts, as in the direct form.
func (g *Group) broadcastFew(d tensor.DType, b []byte, root int) error {
	if len(b) <= smallBroadcast {
		return g.tree(root, func(int, int) []byte { return b })
	}
	span := func(lo, hi int) []byte { return share(b, d.Size(), len(g.ranks), lo, hi) }
	if err := g.tree(root, span); err != nil {
		return err
	}
	return g.doubling(root, true, span)
}

// gatherWhole gathers the ranks' b into the group's scratch memory.
func (g *Group) gatherWhole(b []byte) (slot func(r int) []byte, err error) {
	size := padded(len(b))
	all := g.scratchBytes(len(g.ranks) * size)
	copy(all[g.rank*size:], b)
	err = g.doubling(0, false, func(lo, hi int) []byte { return all[lo*size : hi*size] })
	return func(r int) []byte { return all[r*size:][:len(b)] }, err
}

// allReduceFew combines b over the ranks, in place.
func (g *Group) allReduceFew(d tensor.DType, op Op, b []byte) error {
	n := len(g.ranks)
	if n*len(b) <= gatherReduce {
		slot, err := g.gatherWhole(b)
		if err == nil {
			combineAll(d, op, b, n, slot)
		}
		return err
	}
	size := pieceSize(len(b), n)
	whole := func(q int) []byte { return b[q*size : min((q+1)*size, len(b))] }
	c := chain{
		pieces: (len(b) + size - 1) / size, size: size,
		own: whole, keep: whole, end: func(int) int { return 0 },
	}
	return c.run(g, d, op)
}

// reduceScatterFew combines the ranks' src and leaves part Rank in dst, which may be that part of src.
func (g *Group) reduceScatterFew(d tensor.DType, op Op, dst, src []byte) error {
	n := len(g.ranks)
	if len(dst) == 0 {
		return nil
	}
	if n*len(src) <= gatherReduce {
		slot, err := g.gatherWhole(src)
		if err == nil {
			combineAll(d, op, dst, n, func(r int) []byte { return slot(r)[g.rank*len(dst):][:len(dst)] })
		}
		return err
	}
	size := min(pieceSize(len(src), n), padded(len(dst)))
	each := (len(dst) + size - 1) / size // pieces of a part
	piece := func(q int) (lo, hi int) { return q % each * size, min((q%each+1)*size, len(dst)) }
	c := chain{
		pieces: n * each, size: size,
		own: func(q int) []byte {
			lo, hi := piece(q)
			return src[q/each*len(dst):][lo:hi]
		},
		keep: func(q int) []byte {
			if q/each != g.rank {
				return nil
			}
			lo, hi := piece(q)
			return dst[lo:hi]
		},
		end: func(q int) int { return q / each },
	}
	return c.run(g, d, op)
}

// pieceSize returns the size of a vector's pieces on their way along n ranks: as many pieces as steps to fill, within
// bounds, and aligned for every element type.
func pieceSize(bytes, n int) int { return padded(min(max(bytes/(2*n), minPiece), maxPiece)) }

// A chain combines vectors in rank order: pieces go up from rank 0 to the last, each rank adding its own, and results
// come back down to the ranks that need them. All ranks step together: a piece moves by one rank in each step, in both
// directions, so that no rank waits for one with equal progress.
type chain struct {
	pieces, size int
	own          func(q int) []byte // this rank's piece q; not written after it has been combined
	keep         func(q int) []byte // where to keep its result, or nil; may equal own
	end          func(q int) int    // the lowest rank that needs it
}

// run takes this rank's steps.
func (c *chain) run(g *Group, d tensor.DType, op Op) error {
	last := len(g.ranks) - 1
	scratch := g.scratchBytes(4 * c.size)
	buffer := func(way, q int) []byte { return scratch[(2*way+q%2)*c.size:][:len(c.own(q))] }
	above := func(q int) []byte { // where the result of piece q lies
		if k := c.keep(q); k != nil {
			return k
		}
		return buffer(1, q)
	}
	// The result of piece q reaches this rank, by way of the last rank, in step q+back.
	back := 2 * (last - g.rank)
	for s := range c.pieces + back + 1 {
		var sends, recvs []part
		up, down := s, s-back // the pieces that arrive in this step; the rank passes on the ones before them
		if up < c.pieces && g.rank > 0 {
			recvs = append(recvs, part{g.rank - 1, buffer(0, up)})
		}
		if q := up - 1; q >= 0 && q < c.pieces && g.rank < last {
			from := c.own(q)
			if g.rank > 0 {
				from = buffer(0, q)
			}
			sends = append(sends, part{g.rank + 1, from})
		}
		if down >= 0 && down < c.pieces && g.rank < last && g.rank >= c.end(down) {
			recvs = append(recvs, part{g.rank + 1, above(down)})
		}
		if q := down - 1; q >= 0 && q < c.pieces && g.rank > c.end(q) {
			from := above(q)
			if g.rank == last {
				from = buffer(0, q)
			}
			sends = append(sends, part{g.rank - 1, from})
		}
		if err := g.exchange(sends, recvs); err != nil {
			return err
		}
		if up < c.pieces && g.rank > 0 {
			combine(d, op, buffer(0, up), c.own(up))
			if k := c.keep(up); k != nil && g.rank == last {
				copy(k, buffer(0, up))
			}
		}
	}
	return nil
}
