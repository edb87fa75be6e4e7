package ring

// Bytes returns the bytes that the rank sends in the hops of one forward and one backward pass, given the bytes
// of one row of K and V, and of one row of dK and dV, of the heads that the hops work on.
func (s *Schedule) Bytes(kvRow, gradRow int64) (forward, backward int64) {
	kv, _ := s.moved(s.Forward)
	again, grads := s.moved(s.Backward)
	return kv * kvRow, grads*gradRow + again*kvRow
}

// moved counts the rows that the rank sends in hops, of keys and of gradients.
func (s *Schedule) moved(hops []Hop) (kv, grads int64) {
	for i := range hops {
		h := &hops[i]
		kv += s.rows(h.SendKV)
		grads += s.rows(h.SendGrad)
		for j := range h.Then {
			kv += s.rows(h.Then[j].SendKV)
		}
	}
	return kv, grads
}

// rows counts the rows of moves to others.
func (s *Schedule) rows(moves []Move) (rows int64) {
	for i := range moves {
		if moves[i].Peer != s.Rank {
			rows += int64(moves[i].Block.Hi - moves[i].Block.Lo)
		}
	}
	return rows
}
