package ring

import "github.com/cprun/cprun/partition"

// ring is Ring Attention (Liu et al., arXiv:2310.01889): in hop h a rank holds the keys of
// the owner h ranks before it, and passes them on while it computes. A block stops at the
// last rank that sees any of it, and only the rows that somebody further along needs travel.
//
// In the backward pass the gradients of a block follow it as messages of their own, one hop
// late: what rank r-1 finished in hop h-1 reaches rank r during hop h and is added to what r
// computed meanwhile, so that no tile waits for a gradient. The last visitor sends the sum
// home to the owner.
//
// Under a window that reaches no further than two blocks it is the all-gather, a halo: the rows in
// the window come in one hop.
func (p *Planner) ring(rank int) *Schedule {
	if p.halo {
		return p.allgather(rank)
	}
	n := p.size
	stops := p.stops(rank)
	next, before := (rank+1)%n, (rank-1+n)%n
	hops := make([]Hop, n+1)
	room := singles{moves: make([]Move, 0, 4*n), folds: make([]Fold, 0, n)}
	hops[0] = p.own(rank)
	for h := range n {
		hop, owner := &hops[h], (rank-h+n)%n
		if h > 0 {
			if here := stops[h].here; here.Len() > 0 {
				hop.Tiles, hop.Keys = p.index.Tiles(rank, owner), Block{kvBuffer(h), 0, here.Hi}
				hop.From = from(owner, here.Hi)
			}
		}
		if h+1 < n {
			if rows := stops[h].after; rows.Len() > 0 {
				hop.SendKV = room.move(next, kvBuffer(h), rows)
			}
			if rows := stops[h+1].carried(); rows.Len() > 0 {
				hop.RecvKV = room.move(before, kvBuffer(h+1), rows)
			}
		}
	}
	for h := 1; h < n; h++ {
		p.ringGrads(hops, rank, h, &stops[h], &room)
	}
	p.ringHome(hops, rank, &stops[0])
	hops[n].Label = "gradients home"
	for h := 1; h < n; h++ {
		if hop := &hops[h]; !hop.empty() {
			hop.Label = p.hopLabel(h, (rank-h+n)%n)
		}
	}
	return p.finish(&Schedule{Algorithm: "ring", Rank: rank, Backward: hops})
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

// ringGrads plans the gradient of the block that visits rank in hop h >= 1: the neighbour's
// sum comes in during hop h, and the new sum leaves during hop h+1.
func (p *Planner) ringGrads(hops []Hop, rank, h int, s *stop, room *singles) {
	n := p.size
	before, sum := s.before, s.summed()
	if h > s.last || sum.Len() == 0 {
		return
	}
	hop, buf := &hops[h], gradTurn+h%2
	from := (rank - 1 + n) % n
	switch {
	case len(hop.Tiles) == 0: // nothing of our own: pass the sum on
		hop.RecvGrad = room.move(from, buf, before)
	case before.Len() == 0: // the first to compute with it
		hop.Grads = Block{buf, sum.Lo, sum.Hi}
	default:
		hop.Grads = Block{buf, sum.Lo, sum.Hi}
		hop.RecvGrad = room.move(from, gradRecv, before)
		hop.Fold = room.fold(Fold{Block{buf, before.Lo, before.Hi}, Block{gradRecv, before.Lo, before.Hi}})
	}
	to := (rank + 1) % n
	if h == s.last {
		to = (rank - h + n) % n // home, to the owner
	}
	hops[h+1].SendGrad = room.move(to, buf, sum)
}

// singles is lists of one, in memory that they share. Who adds to one gets other memory.
type singles struct {
	moves []Move
	folds []Fold
}

func (s *singles) move(peer, buf int, r partition.Range) []Move {
	s.moves = append(s.moves, move(peer, buf, r))
	n := len(s.moves)
	return s.moves[n-1 : n : n]
}

func (s *singles) fold(f Fold) []Fold {
	s.folds = append(s.folds, f)
	n := len(s.folds)
	return s.folds[n-1 : n : n]
}

// ringHome plans the arrival of the own block's gradient from its last visitor. s is the block's
// first stop, at home.
func (p *Planner) ringHome(hops []Hop, rank int, s *stop) {
	if s.last == 0 {
		return
	}
	hop, buf, all := &hops[s.last+1], gradRecv, s.after
	if len(hop.RecvGrad) > 0 {
		buf = gradHome
	}
	hop.RecvGrad = append(hop.RecvGrad, move((rank+s.last)%p.size, buf, all))
	hop.Fold = append(hop.Fold, Fold{Block{0, all.Lo, all.Hi}, Block{buf, all.Lo, all.Hi}})
}

// allgather fetches at once all rows of other blocks that the rank needs and no others: while the own
// block is computed, which makes two kernel calls, or before the only one. It is the faster algorithm where links
// are quick to start and the memory for all keys is there (Llama 3, arXiv:2407.21783, section
// 3.3.2).
func (p *Planner) allgather(rank int) *Schedule {
	s := &Schedule{Algorithm: "allgather", Rank: rank}
	gather := func(before bool) []Hop {
		if before {
			return p.gatherBefore(rank)
		}
		return p.gatherBeside(rank)
	}
	s.Backward = gather(p.before.backward)
	if p.before.forward != p.before.backward {
		s.Forward = p.forwardOf(gather(p.before.forward))
	}
	return p.finish(s)
}

// gatherBeside is the hops of a backward pass in which rows travel beside a first call.
func (p *Planner) gatherBeside(rank int) []Hop {
	const fetched, returned = 1, 2
	first := p.own(rank)
	second := Hop{Label: "hop 1 all others"}
	third := Hop{Label: "gradients home"}
	rows, back := 0, 0
	var ranges []partition.Range // of one peer
	if list, ok := p.index.Owners(rank); ok {
		first.RecvKV, third.SendGrad, second.From = make([]Move, 0, 2*len(list)), make([]Move, 0, 2*len(list)), make([]Source, 0, len(list))
	}
	if list, ok := p.index.Readers(rank); ok {
		first.SendKV, third.RecvGrad, third.Fold = make([]Move, 0, 2*len(list)), make([]Move, 0, 2*len(list)), make([]Fold, 0, 2*len(list))
	}
	// Rank r talks to r+d and r-d in turn d, so that no rank is the first peer of all.
	for to := range p.ahead(rank) {
		ranges = p.index.NeedRanges(ranges[:0], to, rank)
		for _, need := range ranges {
			first.SendKV = append(first.SendKV, move(to, 0, need))
			b := Block{returned, back, back + need.Len()}
			back = b.Hi
			third.RecvGrad = append(third.RecvGrad, Move{to, b})
			third.Fold = append(third.Fold, Fold{Block{0, need.Lo, need.Hi}, b})
		}
	}
	for from := range p.behind(rank) {
		ranges = p.index.NeedRanges(ranges[:0], rank, from)
		if len(ranges) > 0 {
			second.Tiles = placed(second.Tiles, p.index.Tiles(rank, from), ranges, rows)
		}
		for _, need := range ranges {
			b := Block{fetched, rows, rows + need.Len()}
			first.RecvKV = append(first.RecvKV, Move{from, b})
			third.SendGrad = append(third.SendGrad, Move{from, b})
			second.From = append(second.From, Source{Rank: from, Rows: need})
			rows = b.Hi
		}
	}
	if len(second.Tiles) > 0 {
		second.Keys = Block{fetched, 0, rows}
		second.Grads = second.Keys
	}
	return []Hop{first, second, third}
}
