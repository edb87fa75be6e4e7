package ring

import (
	"fmt"

	"github.com/cprun/cprun/partition"
)

// ring is Ring Attention (Liu et al., arXiv:2310.01889): in hop h a rank holds the keys of
// the owner h ranks before it, and passes them on while it computes. A block stops at the
// last rank that sees any of it, and only the rows that somebody further along needs travel.
//
// In the backward pass the gradients of a block follow it as messages of their own, one hop
// late: what rank r-1 finished in hop h-1 reaches rank r during hop h and is added to what r
// computed meanwhile, so that no tile waits for a gradient. The last visitor sends the sum
// home to the owner.
func (p *plans) ring(rank int) *Schedule {
	n := p.size
	at := func(r int) int { return ((r % n) + n) % n }
	hops := make([]Hop, n+1)
	hops[0] = p.own(rank)
	for h := range hops {
		hop := &hops[h]
		owner, next := at(rank-h), at(rank-h-1)
		if h > 0 && h < n {
			hop.Label = fmt.Sprintf("hop %d owner %d", h, owner)
			hop.Tiles = p.tiles[rank][owner]
			if len(hop.Tiles) > 0 {
				hop.Keys = Block{kvBuffer(h), 0, p.need(rank, owner).Hi}
			}
		}
		if h+1 < n {
			if rows := p.carried(owner, h+1); rows.Len() > 0 {
				hop.SendKV = []Move{move(at(rank+1), kvBuffer(h), rows)}
			}
			if rows := p.carried(next, h+1); rows.Len() > 0 {
				hop.RecvKV = []Move{move(at(rank-1), kvBuffer(h+1), rows)}
			}
		}
	}
	for h := 1; h < n; h++ {
		p.ringGrads(hops, rank, h)
	}
	p.ringHome(hops, rank)
	hops[n].Label = "gradients home"
	return p.finish(&Schedule{Algorithm: "ring", Rank: rank, Forward: forwardOf(hops), Backward: hops})
}

// The K/V buffer that holds the block of hop h: two take turns.
func kvBuffer(h int) int {
	if h == 0 {
		return 0
	}
	return 1 + (h-1)%2
}

// Gradient buffers: two take turns for what a hop computes, since the last one is still on
// its way; one receives a neighbour's sum, and one the own block's, where both come at once.
const (
	gradTurn = 1 // and 2
	gradRecv = 3
	gradHome = 4
)

// carried is the rows of owner's block that must arrive at the rank h hops away: what it or
// anybody behind it needs.
func (p *plans) carried(owner, h int) partition.Range {
	var u partition.Range
	for ; h < p.size; h++ {
		u = union(u, p.need((owner+h)%p.size, owner))
	}
	return u
}

// summed is the rows of owner's gradient that hops 1 to h have added to.
func (p *plans) summed(owner, h int) partition.Range {
	var u partition.Range
	for ; h > 0; h-- {
		u = union(u, p.need((owner+h)%p.size, owner))
	}
	return u
}

// last is the last hop in which anybody computes with owner's block.
func (p *plans) last(owner int) int {
	h := p.size - 1
	for h > 0 && len(p.tiles[(owner+h)%p.size][owner]) == 0 {
		h--
	}
	return h
}

// ringGrads plans the gradient of the block that visits rank in hop h >= 1: the neighbour's
// sum comes in during hop h, and the new sum leaves during hop h+1.
func (p *plans) ringGrads(hops []Hop, rank, h int) {
	n := p.size
	owner := ((rank-h)%n + n) % n
	end := p.last(owner)
	sum := p.summed(owner, h)
	if h > end || sum.Len() == 0 {
		return
	}
	hop, buf := &hops[h], gradTurn+h%2
	before := p.summed(owner, h-1)
	from := ((rank-1)%n + n) % n
	switch {
	case len(hop.Tiles) == 0: // nothing of our own: pass the sum on
		hop.RecvGrad = append(hop.RecvGrad, move(from, buf, before))
	case before.Len() == 0: // the first to compute with it
		hop.Grads = Block{buf, sum.Lo, sum.Hi}
	default:
		hop.Grads = Block{buf, sum.Lo, sum.Hi}
		hop.RecvGrad = append(hop.RecvGrad, move(from, gradRecv, before))
		hop.Fold = append(hop.Fold, Fold{Block{buf, before.Lo, before.Hi}, Block{gradRecv, before.Lo, before.Hi}})
	}
	to := (rank + 1) % n
	if h == end {
		to = owner
	}
	hops[h+1].SendGrad = append(hops[h+1].SendGrad, move(to, buf, sum))
}

// ringHome plans the arrival of the own block's gradient from its last visitor.
func (p *plans) ringHome(hops []Hop, rank int) {
	end := p.last(rank)
	if end == 0 {
		return
	}
	hop, buf := &hops[end+1], gradRecv
	if len(hop.RecvGrad) > 0 {
		buf = gradHome
	}
	rows := p.summed(rank, end)
	hop.RecvGrad = append(hop.RecvGrad, move((rank+end)%p.size, buf, rows))
	hop.Fold = append(hop.Fold, Fold{Block{0, rows.Lo, rows.Hi}, Block{buf, rows.Lo, rows.Hi}})
}

// allgather fetches at once, while the own block is computed, all rows of other blocks that
// the rank needs, and computes them in one kernel call. It is the faster one where links
// are quick to start and the memory for all keys is there (Llama 3, arXiv:2407.21783, section
// 3.3.2).
func (p *plans) allgather(rank int) *Schedule {
	const fetched, returned = 1, 2
	first := p.own(rank)
	second := Hop{Label: "hop 1 all others"}
	third := Hop{Label: "gradients home"}
	rows, back := 0, 0
	for d := 1; d < p.size; d++ {
		// Rank r talks to r+d and r-d in turn d, so that nobody is everybody's first peer.
		to, from := (rank+d)%p.size, ((rank-d)%p.size+p.size)%p.size
		if need := p.need(to, rank); need.Len() > 0 {
			first.SendKV = append(first.SendKV, move(to, 0, need))
			b := Block{returned, back, back + need.Len()}
			back = b.Hi
			third.RecvGrad = append(third.RecvGrad, Move{to, b})
			third.Fold = append(third.Fold, Fold{Block{0, need.Lo, need.Hi}, b})
		}
		if need := p.need(rank, from); need.Len() > 0 {
			b := Block{fetched, rows, rows + need.Len()}
			first.RecvKV = append(first.RecvKV, Move{from, b})
			third.SendGrad = append(third.SendGrad, Move{from, b})
			second.Tiles = append(second.Tiles, shifted(p.tiles[rank][from], rows-need.Lo)...)
			rows = b.Hi
		}
	}
	if len(second.Tiles) > 0 {
		second.Keys = Block{fetched, 0, rows}
		second.Grads = second.Keys
	}
	hops := []Hop{first, second, third}
	return p.finish(&Schedule{Algorithm: "allgather", Rank: rank, Forward: forwardOf(hops), Backward: hops})
}

// shifted is the tiles with their keys d rows further on.
func shifted(tiles []partition.Tile, d int) []partition.Tile {
	out := make([]partition.Tile, len(tiles))
	for i, t := range tiles {
		t.K = partition.Range{Lo: t.K.Lo + d, Hi: t.K.Hi + d}
		t.Band = partition.Band{Lo: t.Band.Lo + d, Hi: t.Band.Hi + d}
		out[i] = t
	}
	return out
}
