package ring

import (
	"slices"

	"github.com/cprun/cprun/partition"
)

// ring plans Ring Attention (Liu et al., arXiv:2310.01889): in hop h a rank holds the keys of the owner h ranks before
// it, and passes them on while it computes. A block stops at the last rank that sees any of it, and only the rows that
// a later rank needs travel.
//
// In the backward pass the gradients of a block follow as messages of their own, one hop late: the sum that rank r-1
// finished in hop h-1 reaches rank r during hop h. Rank r then adds it to its own, so no tile waits for a gradient. The
// last visitor sends the sum home to the owner.
//
// Under a window that reaches no further than two blocks it is the all-gather, a halo: the rows in the window come in
// one hop.
func (p *Planner) ring(rank int) *Schedule {
	if p.halo {
		return p.allgather(rank)
	}
	n, visits := p.size, p.visits(rank)
	next, before := (rank+1)%n, (rank-1+n)%n
	hops, moves, folds := make([]Hop, n+1), make([]Move, 0, 4*n), make([]Fold, 0, n)
	hops[0], hops[n].Label = p.own(rank), "gradients home"
	for h := range n {
		hop, v, owner := &hops[h], &visits[h], (rank-h+n)%n
		if h > 0 && v.here.Len() > 0 {
			hop.Tiles, hop.Keys = p.index.Tiles(rank, owner), Block{kvBuffer(h), 0, v.here.Hi}
			hop.Columns = p.columns(nil, owner, hop.Keys.rows())
		}
		if h+1 < n && v.after.Len() > 0 {
			hop.SendKV = one(&moves, move(next, kvBuffer(h), v.after))
		}
		if h+1 < n && visits[h+1].carried().Len() > 0 {
			hop.RecvKV = one(&moves, move(before, kvBuffer(h+1), visits[h+1].carried()))
		}
		sum, buf := v.summed(), gradTurn+h%2
		if h == 0 || h > v.last || sum.Len() == 0 {
			continue
		}
		if len(hop.Tiles) > 0 {
			hop.Grads = Block{buf, sum.Lo, sum.Hi}
		}
		switch { // the sum of the ranks before comes in during this hop
		case len(hop.Tiles) == 0: // nothing of our own: pass it on
			hop.RecvGrad = one(&moves, move(before, buf, v.before))
		case v.before.Len() > 0:
			hop.RecvGrad = one(&moves, move(before, gradRecv, v.before))
			came := hop.RecvGrad[0].Block
			hop.Fold = one(&folds, Fold{Block{buf, came.Lo, came.Hi}, came})
		}
		to := next
		if h == v.last {
			to = owner
		}
		hops[h+1].SendGrad = one(&moves, move(to, buf, sum)) // and the new sum leaves in the next
	}
	if own := &visits[0]; own.last > 0 { // the last visitor sends the own gradient home
		hop, buf := &hops[own.last+1], gradRecv
		if len(hop.RecvGrad) > 0 {
			buf = gradHome
		}
		hop.RecvGrad = append(hop.RecvGrad, move((rank+own.last)%n, buf, own.after))
		hop.Fold = append(hop.Fold, Fold{Block{0, own.after.Lo, own.after.Hi}, Block{buf, own.after.Lo, own.after.Hi}})
	}
	for h := 1; h < n; h++ {
		if hop := &hops[h]; !hop.empty() {
			hop.Label = p.hopLabel(h, (rank-h+n)%n)
		}
	}
	return p.finish(&Schedule{Rank: rank, Backward: hops})
}

// split moves the second half of the own queries of a backward pass to its last hop, so that the gradients of the own
// keys come home beside a call. The first half stays in the first hop, beside the first rows that arrive.
func split(hops []Hop) []Hop {
	hops = slices.Clone(hops)
	first, last := &hops[0], &hops[len(hops)-1]
	if len(first.Tiles) != 1 || first.Tiles[0].Q.Len() < 2 || len(last.RecvGrad) == 0 || len(last.Tiles) > 0 {
		return hops
	}
	early, late := first.Tiles[0], first.Tiles[0]
	half := early.Q.Lo + early.Q.Len()/2
	early.Q.Hi, late.Q.Lo = half, half
	early.K.Hi, late.K.Lo = min(early.K.Hi, half+early.Band.Hi), max(late.K.Lo, half+late.Band.Lo)
	if early.K.Lo >= early.K.Hi || late.K.Lo >= late.K.Hi {
		return hops
	}
	last.Tiles, last.Keys, last.Columns, last.Grads = []partition.Tile{late}, first.Keys, first.Columns, first.Grads
	first.Tiles, first.Grads.Hi, last.Held = []partition.Tile{early}, early.K.Hi, early.K.Hi
	return hops
}

// kvBuffer returns the K/V buffer of the block of hop h: two take turns.
func kvBuffer(h int) int {
	if h == 0 {
		return 0
	}
	return 1 + (h-1)%2
}

// Gradient buffers. Two take turns for the results of hops, since the previous one is still in transfer. One receives a
// neighbour's sum, and one the own block's, if both come at once.
const (
	gradTurn = 1 // and 2
	gradRecv = 3
	gradHome = 4
)

// one returns a one-element slice carved from a shared array, with capacity 1, so that append reallocates.
func one[T any](shared *[]T, x T) []T {
	*shared = append(*shared, x)
	n := len(*shared)
	return (*shared)[n-1 : n : n]
}

// allgather fetches all rows of other blocks that the rank needs at once: while it computes with its own block, which
// makes two kernel calls, or before the only one. It is the faster algorithm if links start quickly and memory holds
// all keys (Llama 3, arXiv:2407.21783, section 3.3.2).
func (p *Planner) allgather(rank int) *Schedule {
	s := &Schedule{Rank: rank}
	gather := map[bool]func(*Planner, int) []Hop{false: (*Planner).gatherBeside, true: (*Planner).gatherBefore}
	s.Backward = gather[p.before.backward](p, rank)
	if p.before.forward != p.before.backward {
		s.Forward = gather[p.before.forward](p, rank)
	}
	return p.finish(s)
}

// gatherBeside returns the hops of a backward pass in which rows travel beside a first call.
func (p *Planner) gatherBeside(rank int) []Hop {
	const fetched = 1
	first, second, third := p.own(rank), Hop{Label: "hop 1 all others"}, Hop{Label: "gradients home"}
	var ranges []partition.Range // of one peer
	p.serve(rank, &first, &third, func(to int, send func(partition.Range)) {
		ranges = p.index.NeedRanges(ranges[:0], to, rank)
		for _, r := range ranges {
			send(r)
		}
	})
	rows := 0
	for d := 1; d < p.size; d++ {
		from := (rank - d + p.size) % p.size
		ranges = p.index.NeedRanges(ranges[:0], rank, from)
		if len(ranges) > 0 {
			second.Tiles = placed(second.Tiles, p.index.Tiles(rank, from), ranges, rows)
		}
		for _, need := range ranges {
			b := Block{fetched, rows, rows + need.Len()}
			first.RecvKV = append(first.RecvKV, Move{from, b})
			third.SendGrad = append(third.SendGrad, Move{from, b})
			second.Columns = p.columns(second.Columns, from, need)
			rows = b.Hi
		}
	}
	if len(second.Tiles) > 0 {
		second.Keys = Block{fetched, 0, rows}
		second.Grads = second.Keys
	}
	return []Hop{first, second, third}
}

// serve plans that rank sends rows to all others in the first hop, and folds their gradients in the last. rows calls
// send for each range of rows that a rank reads. Rank r begins with r+1, so that no rank is the first peer of all.
func (p *Planner) serve(rank int, first, last *Hop, rows func(to int, send func(partition.Range))) {
	const returned = 2
	back := 0
	for d := 1; d < p.size; d++ {
		to := (rank + d) % p.size
		rows(to, func(r partition.Range) {
			own, b := Block{0, r.Lo, r.Hi}, Block{returned, back, back + r.Len()}
			first.SendKV = append(first.SendKV, Move{to, own})
			last.RecvGrad = append(last.RecvGrad, Move{to, b})
			last.Fold = append(last.Fold, Fold{own, b})
			back = b.Hi
		})
	}
}

// gatherBefore returns the hops of a backward pass with one kernel call, on all rows in the order of the sequence.
// Rows of others arrive first, beside copies of the rank's own. The call hides the transfer only if its kernel waits
// for rows by itself. It is faster if few rows travel: a second call would be small, and its results would have to be
// merged into the first. MagiAttention's authors also found stages slower than none if links are fast
// (SandAI-org/MagiAttention#353).
//
// The gradients of gathered rows go home in one hop, and to the rank's own rows by copies. A rank that reads no rows of
// others computes with its own in place.
func (p *Planner) gatherBefore(rank int) []Hop {
	const gathered = 1
	g, all, own := p.index.Gather(rank), p.index.Keys(rank), 0
	whole := Block{gathered, 0, g.Rows}
	first, home := Hop{Label: "gather", Gated: true}, Hop{Label: "gradients home"}
	call := Hop{Label: p.hopLabel(0, rank) + " and others", Keys: whole, Grads: whole, Tiles: g.Tiles}
	for _, r := range g.Runs {
		here, there := Block{gathered, r.At, r.At + r.Rows.Len()}, Block{0, r.Rows.Lo, r.Rows.Hi}
		call.Columns = p.columns(call.Columns, r.Owner, r.Rows)
		if r.Owner == rank {
			own += r.Rows.Len()
			first.CopyKV, home.CopyGrad = append(first.CopyKV, Copy{here, there}),
				append(home.CopyGrad, Copy{there, here})
			continue
		}
		first.RecvKV = append(first.RecvKV, Move{r.Owner, here})
		home.SendGrad = append(home.SendGrad, Move{r.Owner, here})
	}
	switch {
	case own == g.Rows:
		first, call, home = p.own(rank), Hop{Label: call.Label}, Hop{Label: home.Label}
	case own < all:
		first.Grads = Block{0, 0, all} // nothing may come for some rows, so that all are set
	}
	var runs []partition.Run
	p.serve(rank, &first, &home, func(to int, send func(partition.Range)) {
		runs = p.index.Runs(runs[:0], to, rank)
		for _, r := range runs {
			send(r.Rows)
		}
	})
	return []Hop{first, call, home}
}

// Packed documents scatter the rows that one rank needs of another: whole documents of third ranks lie between them.
// So rows travel in several moves for a pair of ranks, the ranges of partition.Index.NeedRanges, and no gap travels to
// save a message. Ranges end at the end of a document or mask, and the document layout stores the chunks of a document
// one after another. So a pair has at most one range for each document that both have part of.

// placed adds tiles on rows of an owner's block that were copied one after another to row at. All keys of a tile are
// visible, so they lie in one range.
func placed(to, tiles []partition.Tile, ranges []partition.Range, at int) []partition.Tile {
	for _, t := range tiles {
		here := at
		for _, r := range ranges {
			if r.Lo <= t.K.Lo && t.K.Hi <= r.Hi {
				to = append(to, shifted(t, here-r.Lo))
				break
			}
			here += r.Len()
		}
	}
	return to
}

func shifted(t partition.Tile, d int) partition.Tile {
	t.K = partition.Range{Lo: t.K.Lo + d, Hi: t.K.Hi + d}
	t.Band = partition.Band{Lo: t.Band.Lo + d, Hi: t.Band.Hi + d}
	return t
}
