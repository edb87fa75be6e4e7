package ring

// Keys returns how many keys the rank itself holds.
func (s *Schedule) Keys() int {
	if s.KV == nil {
		return s.KVRows[0]
	}
	n := 0
	for _, m := range s.KV.Send {
		n = max(n, m.Box.Rows.Hi)
	}
	return n
}

// Work is what the kernel is asked for at a time: so many queries, and so many heads of queries and keys. The
// hops run Groups times.
type Work struct{ Queries, Heads, KVHeads, Groups int }

// Work returns the work of a rank that has so many queries of so many heads: those, or what it has traded
// for them, or the largest group of heads that it gathers.
func (s *Schedule) Work(queries, heads, kvHeads int) Work {
	if s.Q != nil {
		queries, heads, kvHeads = s.Q.Rows, s.Q.Heads, s.KV.Heads
	}
	list := s.groups(heads, kvHeads)
	return Work{queries, list[0].q.Len(), list[0].kv.Len(), len(list)}
}

// keyHeads is the heads of keys of all groups.
func (s *Schedule) keyHeads(own int) int {
	if s.KV == nil {
		return own
	}
	return s.KV.Heads
}

// HeadBytes is the bytes of one row of one head of what travels: q, O (dO is of its type), LSE, K and V
// together, dQ, and dK and dV together.
type HeadBytes struct{ Q, O, LSE, KV, DQ, DKV int64 }

// Traffic returns the bytes that the rank sends in one forward and one backward pass, in the trades of
// heads and in the hops, where it has so many heads of keys itself.
func (s *Schedule) Traffic(b HeadBytes, kvHeads int) (forward, backward int64) {
	kv := int64(s.keyHeads(kvHeads))
	forward, backward = s.Bytes(b.KV*kv, b.DKV*kv)
	if s.Q != nil {
		q, keys := s.sent(s.Q.Send), s.sent(s.KV.Send)
		o, dkv := s.sent(s.Q.Recv), s.sent(s.KV.Recv)
		forward += q*b.Q + keys*b.KV + o*(b.O+b.LSE)
		backward += q*(b.Q+2*b.O+b.LSE) + keys*b.KV + o*b.DQ + dkv*b.DKV
	}
	return forward, backward
}

// sent counts rows times heads of boxes that go to others.
func (s *Schedule) sent(moves []HeadMove) (n int64) {
	for _, m := range moves {
		if m.Peer != s.Rank {
			n += int64(m.Box.Rows.Len()) * int64(m.Box.Heads.Len())
		}
	}
	return n
}

// Bytes returns what the rank sends in the hops of one forward and one backward pass, given the bytes
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
