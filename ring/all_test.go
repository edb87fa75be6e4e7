package ring

// Must returns x, which a test cannot do without.
func Must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}

// All returns the schedules of every rank.
func All(algorithm string, s Spec) []*Schedule {
	p := Must(NewPlanner(algorithm, s))
	p.Prepare()
	all := make([]*Schedule, s.Size)
	for r := range all {
		all[r] = p.Schedule(r)
	}
	return all
}

// Bytes returns the bytes that the rank sends in the hops of one forward and one backward pass, given the bytes
// of one row of K and V, and of one row of dK and dV, of the heads that the hops work on.
func (s *Schedule) Bytes(kvRow, gradRow int64) (forward, backward int64) {
	kv, again, grads := int64(0), int64(0), int64(0)
	for i := range s.Forward {
		kv += rowsOf(s.Forward[i].SendKV, s.KVBufs)
	}
	for i := range s.Backward {
		again += rowsOf(s.Backward[i].SendKV, s.KVBufs)
		grads += rowsOf(s.Backward[i].SendGrad, s.GradBufs)
	}
	return kv * kvRow, again*kvRow + grads*gradRow
}

// rowsOf counts the rows of moves of the first group of heads. Each group moves the same rows.
func rowsOf(moves []Move, bufs []Buffer) (rows int64) {
	for _, m := range moves {
		if bufs[m.Block.Buf].Heads.Lo == 0 {
			rows += int64(m.Block.Hi - m.Block.Lo)
		}
	}
	return rows
}
