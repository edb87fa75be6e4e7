package ring

import "github.com/cprun/cprun/partition"

// gatherBefore is the hops of a backward pass with one kernel call: the rows that the rank needs arrive first, and stand
// with copies of its own in the order of the sequence. Nothing hides the transfer, unless the kernel waits for rows by itself:
// then it begins at once, with what needs none of others. It is the faster one where few rows
// travel: a second call would be small, would cut what a query sees in two,
// and its results would have to be merged with those of the first. MagiAttention's authors, too, found stages
// slower than none where links are fast (SandAI-org/MagiAttention#353).
//
// The gradients of what was gathered go home in one hop, those of the rank's own rows as copies. A rank that reads
// no rows of others computes with its own where they are.
func (p *Planner) gatherBefore(rank int) []Hop {
	const gathered, returned = 1, 2
	g := p.index.Gather(rank)
	first, call, home := Hop{Label: "gather", Early: true}, Hop{Label: p.hopLabel(0, rank) + " and others"}, Hop{Label: "gradients home"}
	call.Keys = Block{gathered, 0, g.Rows}
	call.Grads, call.Tiles = call.Keys, g.Tiles
	own, n := 0, len(g.Runs)
	call.From, first.RecvKV, home.SendGrad = make([]Source, 0, n), make([]Move, 0, n), make([]Move, 0, n)
	for _, r := range g.Runs {
		here := Block{gathered, r.At, r.At + r.Rows.Len()}
		call.From = append(call.From, Source{Rank: r.Owner, Rows: r.Rows})
		first.RecvKV = append(first.RecvKV, Move{r.Owner, here})
		home.SendGrad = append(home.SendGrad, Move{r.Owner, here})
		if r.Owner == rank {
			own += r.Rows.Len()
			first.SendKV = append(first.SendKV, move(rank, 0, r.Rows))
			home.RecvGrad = append(home.RecvGrad, move(rank, 0, r.Rows))
		}
	}
	switch all := p.index.Keys(rank); {
	case own == g.Rows:
		first, call, home = p.own(rank), Hop{}, Hop{Label: home.Label}
	case own < all:
		first.Grads = Block{0, 0, all} // nothing may come for some rows, so that all are set
	}
	if list, ok := p.index.Readers(rank); ok && own < g.Rows {
		first.SendKV = append(make([]Move, 0, n+len(list)), first.SendKV...)
		home.RecvGrad = append(make([]Move, 0, n+len(list)), home.RecvGrad...)
		home.Fold = make([]Fold, 0, 2*len(list))
	}
	back := 0
	var runs []partition.Run // of one reader
	for to := range p.ahead(rank) {
		runs = p.index.Runs(runs[:0], to, rank)
		for _, r := range runs {
			b := Block{returned, back, back + r.Rows.Len()}
			back = b.Hi
			first.SendKV = append(first.SendKV, move(to, 0, r.Rows))
			home.RecvGrad = append(home.RecvGrad, Move{to, b})
			home.Fold = append(home.Fold, Fold{Block{0, r.Rows.Lo, r.Rows.Hi}, b})
		}
	}
	return []Hop{first, call, home}
}
