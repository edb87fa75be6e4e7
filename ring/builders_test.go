package ring

import "github.com/cprun/cprun/partition"

// What follows builds schedules of algorithms that users cannot choose, to show that a Schedule
// carries them. Each is a function of the partition alone, as those of patterns.go are.

// gated is the all-gather in one hop: the keys of each peer are an exchange of their own, and are
// computed as soon as they are there.
func (p *Planner) gated(rank int) *Schedule {
	first, home := p.own(rank), Hop{Label: "gradients home"}
	rows, back := 0, 0
	for d := 1; d < p.size; d++ {
		to, from := (rank+d)%p.size, (rank-d+p.size)%p.size
		var part Part
		if need := p.index.Needs(to, rank); need.Len() > 0 {
			part.SendKV = []Move{move(to, 0, need)}
			b := Block{2, back, back + need.Len()}
			back = b.Hi
			home.RecvGrad = append(home.RecvGrad, Move{to, b})
			home.Fold = append(home.Fold, Fold{Block{0, need.Lo, need.Hi}, b})
		}
		if need := p.index.Needs(rank, from); need.Len() > 0 {
			b := Block{1, rows, rows + need.Len()}
			part.Tiles, part.Keys, part.Grads = placed(nil, p.index.Tiles(rank, from), []partition.Range{need}, rows), b, b
			part.RecvKV = []Move{{from, b}}
			home.SendGrad = append(home.SendGrad, Move{from, b})
			rows = b.Hi
		}
		first.Then = append(first.Then, part)
	}
	hops := []Hop{first, home}
	return p.finish(&Schedule{Algorithm: "gated", Rank: rank, Backward: hops})
}

// bothWays is a ring in both directions at once: in hop h a rank computes with the blocks of the
// ranks h before it and h behind it, in two calls. Each gradient goes home in the next hop.
func (p *Planner) bothWays(rank int) *Schedule {
	n := p.size
	at := func(r int) int { return (r%n + n) % n }
	last := n / 2
	hops := make([]Hop, last+2)
	hops[0] = p.own(rank)
	for h := 0; h <= last; h++ {
		hop := &hops[h]
		if h > 0 {
			hop.Label = p.hopLabel(h, at(rank-h))
		}
		for way, sign := range []int{1, -1} {
			if way == 1 && (2*h == n || h == 0) {
				continue // one block comes from both sides
			}
			buf := func(h int) int { return way*2 + kvBuffer(h) } // 1, 2 one way and 3, 4 the other
			owner := at(rank - sign*h)
			if tiles := p.index.Tiles(rank, owner); h > 0 && len(tiles) > 0 {
				need := p.index.Needs(rank, owner)
				grads := Block{way*2 + 1 + h%2, need.Lo, need.Hi}
				call := Part{Keys: Block{buf(h), 0, need.Hi}, Tiles: tiles, Grads: grads}
				if way == 0 {
					hop.Keys, hop.Tiles, hop.Grads = call.Keys, call.Tiles, call.Grads
				} else {
					hop.Then = append(hop.Then, call)
				}
				hops[h+1].SendGrad = append(hops[h+1].SendGrad, Move{owner, grads})
			}
			if need := p.index.Needs(at(rank+sign*h), rank); h > 0 && need.Len() > 0 {
				b := Block{5 + way, need.Lo, need.Hi}
				hops[h+1].RecvGrad = append(hops[h+1].RecvGrad, Move{at(rank + sign*h), b})
				hops[h+1].Fold = append(hops[h+1].Fold, Fold{Block{0, need.Lo, need.Hi}, b})
			}
		}
		for way, sign := range []int{1, -1} {
			if h == last || way == 1 && 2*(h+1) == n {
				continue
			}
			buf := func(h int) int {
				if h == 0 {
					return 0
				}
				return way*2 + kvBuffer(h)
			}
			owner, next := at(rank-sign*h), at(rank-sign*(h+1))
			hop.SendKV = append(hop.SendKV, Move{at(rank + sign), Block{buf(h), 0, p.index.Keys(owner)}})
			hop.RecvKV = append(hop.RecvKV, Move{at(rank - sign), Block{buf(h + 1), 0, p.index.Keys(next)}})
		}
	}
	return p.finish(&Schedule{Algorithm: "both ways", Rank: rank, Backward: hops})
}
