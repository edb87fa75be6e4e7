package ring

// gatherBefore is the hops of a backward pass in which rows of others arrive before the call that reads them. Queries that
// see the rank's own keys alone are computed meanwhile. The others wait, and then find all that they see side by
// side in the order of the sequence, copies of own rows among it: no query is in two calls, so that nothing is merged, and what it
// sees is not cut in two. MagiAttention's authors, too, found that stages cost more than they hide where links are
// fast (SandAI-org/MagiAttention#353).
//
// The gradients of what was gathered go home in one hop.
func (p *Planner) gatherBefore(rank int) []Hop {
	const gathered, returned = 1, 2
	g := p.index.Gather(rank)
	first, call, home := p.own(rank), Hop{Label: "hop 1 all"}, Hop{Label: "gradients home"}
	first.Tiles = g.Own
	call.Keys = Block{gathered, 0, g.Rows}
	call.Grads, call.Tiles = call.Keys, g.Tiles
	for _, r := range g.Runs {
		own, here := Block{0, r.Rows.Lo, r.Rows.Hi}, Block{gathered, r.At, r.At + r.Rows.Len()}
		call.From = append(call.From, Source{Rank: r.Owner, Rows: r.Rows})
		first.RecvKV = append(first.RecvKV, Move{r.Owner, here})
		if r.Owner == rank {
			first.SendKV = append(first.SendKV, Move{rank, own})
			home.Fold = append(home.Fold, Fold{own, here})
		} else {
			home.SendGrad = append(home.SendGrad, Move{r.Owner, here})
		}
	}
	back := 0
	for d := 1; d < p.size; d++ {
		to := (rank + d) % p.size
		for _, r := range p.index.Runs(to, rank) {
			b := Block{returned, back, back + r.Rows.Len()}
			back = b.Hi
			first.SendKV = append(first.SendKV, move(to, 0, r.Rows))
			home.RecvGrad = append(home.RecvGrad, Move{to, b})
			home.Fold = append(home.Fold, Fold{Block{0, r.Rows.Lo, r.Rows.Hi}, b})
		}
	}
	return []Hop{first, call, home}
}
