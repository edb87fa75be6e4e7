package ring

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/cprun/cprun/partition"
)

// sim runs the schedules of all ranks on integers in place of tensors, [rows][heads]: an element of
// q or of keys says which position and head it is, an element of an output or of a gradient is the
// sum of numbers that stand for the pairs in it. It needs no kernel and no communicator, so it tests
// the schedules alone.
type sim struct {
	shape   partition.Shape
	heads   int // of q
	kvHeads int
	wires   [][]chan grid // [from][to], in order
	mu      sync.Mutex
	seen    map[pair]int
	fault   string
}

// A pair is a query and a key, by global positions, in one head of queries.
type pair struct{ head, q, k int }

// A grid is a tensor, [rows][heads].
type grid [][]int

// unset fills rows that were never written or are in flight, so that a use of one shows.
const unset = -1 << 60

func newGrid(rows, heads, fill int) grid {
	g := make(grid, rows)
	for i := range g {
		g[i] = make([]int, heads)
		for j := range g[i] {
			g[i][j] = fill
		}
	}
	return g
}

// box returns a view of rows and heads.
func (g grid) box(b Box) grid {
	out := make(grid, b.Rows.Len())
	for i := range out {
		out[i] = g[b.Rows.Lo+i][b.Heads.Lo:b.Heads.Hi]
	}
	return out
}

// heads returns a view of all rows.
func (g grid) heads(h partition.Range) grid {
	return g.box(Box{Rows: partition.Range{Hi: len(g)}, Heads: h})
}

func (g grid) block(b Block) grid { return g[b.Lo:b.Hi] }

func (g grid) set(f func(i, j, old int) int) {
	for i := range g {
		for j := range g[i] {
			g[i][j] = f(i, j, g[i][j])
		}
	}
}

func (g grid) clone() grid {
	c := make(grid, len(g))
	for i := range g {
		c[i] = append([]int(nil), g[i]...)
	}
	return c
}

// mark returns a number for a position in a head. Sums of different sets of them differ almost certainly.
func mark(head, pos int) int {
	x := uint64(head+1)*0x9e3779b97f4a7c15 ^ uint64(pos+1)*0xbf58476d1ce4e5b9
	x ^= x >> 31
	x *= 0x94d049bb133111eb
	return int(x ^ x>>29)
}

func (s *sim) failf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault == "" {
		s.fault = fmt.Sprintf(format, args...)
	}
}

// simulate runs one schedule a rank, forward and backward, and checks everything: each visible pair
// is computed once for each head, with the right head of keys; each row of the output has the
// pairs of its query and head; each part of a gradient of keys comes home once.
func simulate(t *testing.T, what string, shape partition.Shape, heads, kvHeads int, all []*Schedule) {
	t.Helper()
	if fault := simulated(shape, heads, kvHeads, all); fault != "" {
		t.Fatalf("%s of %+v, %d heads, %d of keys: %s", what, shape, heads, kvHeads, fault)
	}
}

// simulated returns the first fault, or "".
func simulated(shape partition.Shape, heads, kvHeads int, all []*Schedule) string {
	want := map[pair]int{}
	for h := range heads {
		for q := range shape.SeqQ {
			for k := range shape.SeqKV {
				if visible(shape.Mask, q, k) {
					want[pair{h, q, k}] = 1
				}
			}
		}
	}
	for _, backward := range []bool{false, true} {
		if err := rendezvous(all, backward); err != nil {
			return err.Error()
		}
		s := &sim{shape: shape, heads: heads, kvHeads: kvHeads, seen: map[pair]int{},
			wires: make([][]chan grid, shape.Size)}
		for i := range s.wires {
			s.wires[i] = make([]chan grid, shape.Size)
			for j := range s.wires[i] {
				s.wires[i][j] = make(chan grid, 256)
			}
		}
		out, grads := make([]grid, shape.Size), make([]grid, shape.Size)
		var wg sync.WaitGroup
		for r := range shape.Size {
			wg.Go(func() { out[r], grads[r] = s.rank(all[r], backward) })
		}
		wg.Wait()
		switch {
		case s.fault != "":
			return s.fault
		case !maps.Equal(s.seen, want):
			return difference(s.seen, want)
		}
		if fault := s.check(out, grads); fault != "" {
			return fault
		}
	}
	return ""
}

func difference(got, want map[pair]int) string {
	for p, n := range want {
		if got[p] != n {
			return fmt.Sprintf("pair %+v is computed %d times, want %d", p, got[p], n)
		}
	}
	for p := range got {
		if want[p] == 0 {
			return fmt.Sprintf("pair %+v is computed, and not visible", p)
		}
	}
	return ""
}

// check compares outputs and gradients with sums over all visible pairs.
func (s *sim) check(out, grads []grid) string {
	o, dk := newGrid(s.shape.SeqQ, s.heads, 0), newGrid(s.shape.SeqKV, s.kvHeads, 0)
	for p := range s.seen {
		o[p.q][p.head] += mark(p.head, p.k)
		dk[p.k][p.head*s.kvHeads/s.heads] += mark(p.head, p.q)
	}
	for r := range s.shape.Size {
		q := s.shape.Layout.Spans(s.shape.SeqQ, s.shape.Size, r)
		if i, h := differ(out[r], o, q); i >= 0 {
			return fmt.Sprintf("rank %d has a wrong output of query %d, head %d", r, i, h)
		}
		kv := s.shape.Layout.Spans(s.shape.SeqKV, s.shape.Size, r)
		if i, h := differ(grads[r], dk, kv); i >= 0 {
			return fmt.Sprintf("rank %d has a wrong gradient of key %d, head %d", r, i, h)
		}
	}
	return ""
}

// differ finds a position and head at which a rank's grid differs from that of all positions. It ignores nil.
func differ(got, want grid, spans []partition.Span) (pos, head int) {
	if got == nil {
		return -1, -1
	}
	for i, pos := range partition.Positions(spans) {
		for h, x := range want[pos] {
			if got[i][h] != x {
				return pos, h
			}
		}
	}
	return -1, -1
}

// names returns a rank's tensor of positions, each element named by its position and head.
func names(spans []partition.Span, heads int) grid {
	p := partition.Positions(spans)
	g := newGrid(len(p), heads, 0)
	g.set(func(i, j, _ int) int { return p[i]*heads + j })
	return g
}

// rank runs a schedule as the loops of Ring do.
func (s *sim) rank(sch *Schedule, backward bool) (out, dkv grid) {
	q := names(s.shape.Layout.Spans(s.shape.SeqQ, s.shape.Size, sch.Rank), s.heads)
	kv := names(s.shape.Layout.Spans(s.shape.SeqKV, s.shape.Size, sch.Rank), s.kvHeads)
	rowsQ, rowsKV := len(q), len(kv)
	s.give(sch, sch.Q, q, false)
	s.give(sch, sch.KV, kv, false)
	q, kv = s.take(sch, sch.Q, q), s.take(sch, sch.KV, kv)
	o := newGrid(len(q), width(q, sch.Q, s.heads), 0)
	grads := newGrid(sch.GradBufs[0].Rows, width(kv, sch.KV, s.kvHeads), unset)
	s.passes(sch, backward, q, o, kv, grads)
	s.give(sch, sch.Q, o, true)
	if backward {
		s.give(sch, sch.KV, grads, true)
	}
	out = s.takeBack(sch, sch.Q, o, rowsQ, s.heads)
	if backward {
		dkv = s.takeBack(sch, sch.KV, grads, rowsKV, s.kvHeads)
	}
	return out, dkv
}

// passes runs the hops, of all groups of heads.
func (s *sim) passes(sch *Schedule, backward bool, q, o, kv, grads grid) {
	hops, kvHeads := sch.Forward, width(kv, sch.KV, s.kvHeads)
	if backward {
		hops = sch.Backward
	}
	p := &pass{sim: s, sch: sch, inbox: inbox{map[int]int{}, map[int][]grid{}}, turn: map[*Move]int{}, ended: true}
	p.keys, p.grads = buffersOf(sch.KVBufs, kv.clone(), kvHeads), buffersOf(sch.GradBufs, grads, kvHeads)
	passes := []partition.Range{{Hi: kvHeads}}
	if sch.GatherHeads > 0 {
		passes = groups(sch.GatherHeads, kvHeads)
	}
	for i := range hops {
		h := &hops[i]
		p.start(h)
		if h.Begins {
			if len(passes) == 0 || !p.ended {
				s.failf("rank %d begins a pass too many in %q", sch.Rank, h.Label)
				return
			}
			each := width(q, sch.Q, s.heads) / max(kvHeads, 1)
			heads := partition.Range{Lo: passes[0].Lo * each, Hi: passes[0].Hi * each}
			if len(passes) == 1 && sch.GatherHeads == 0 {
				heads = partition.Range{Hi: width(q, sch.Q, s.heads)}
			}
			p.q, p.o, passes = q.heads(heads), o.heads(heads), passes[1:]
			p.calls, p.last, p.ended = 0, false, false
		}
		p.compute(h, backward)
		if h.Ends {
			if p.ended || p.calls > 0 && !p.last {
				s.failf("rank %d ends a pass in %q without a last call", sch.Rank, h.Label)
			}
			p.ended = true
		}
		p.finish(h)
	}
	if len(hops) > 0 && (len(passes) > 0 || !p.ended) {
		s.failf("rank %d lacks %d passes", sch.Rank, len(passes))
	}
}

// width returns the number of heads that the hops work on, also for a grid without rows.
func width(g grid, x *Exchange, own int) int {
	if x != nil {
		return x.Heads
	}
	return own
}

// give sends boxes of a grid: those to send, or on the way back the received ones.
func (s *sim) give(sch *Schedule, x *Exchange, g grid, back bool) {
	if x == nil {
		return
	}
	moves := x.Send
	if back {
		moves = x.Recv
	}
	for _, m := range moves {
		s.wires[sch.Rank][m.Peer] <- g.box(m.Box).clone()
	}
}

func (s *sim) take(sch *Schedule, x *Exchange, own grid) grid {
	if x == nil {
		return own
	}
	all := newGrid(x.Rows, x.Heads, unset)
	for _, m := range x.Recv {
		s.arrive(sch.Rank, m.Peer, all.box(m.Box), func(old, came int) int {
			if old != unset {
				s.failf("rank %d gathers a box twice", sch.Rank)
			}
			return came
		})
	}
	return all
}

func (s *sim) takeBack(sch *Schedule, x *Exchange, all grid, rows, heads int) grid {
	if x == nil {
		return all
	}
	own := newGrid(rows, heads, unset)
	for _, m := range x.Send {
		s.arrive(sch.Rank, m.Peer, own.box(m.Box), func(old, came int) int {
			if (old == unset) == m.Adds {
				s.failf("rank %d: box %+v adds to nothing, or lies over another", sch.Rank, m)
			}
			if m.Adds {
				return old + came
			}
			return came
		})
	}
	return own
}

// arrive puts a peer's message into dst.
func (s *sim) arrive(rank, peer int, dst grid, put func(old, came int) int) {
	s.put(rank, peer, <-s.wires[peer][rank], dst, put)
}

func (s *sim) put(rank, peer int, came, dst grid, put func(old, came int) int) {
	if len(came) != len(dst) || len(came) > 0 && len(came[0]) != len(dst[0]) {
		s.failf("rank %d got %d rows from %d, wants %d, or other heads", rank, len(came), peer, len(dst))
		return
	}
	dst.set(func(i, j, old int) int { return put(old, came[i][j]) })
}

// buffersOf makes the buffers of a list, where own is the first. Some share memory.
func buffersOf(list []Buffer, own grid, heads int) []grid {
	b := []grid{own}
	for i, x := range list[1:] {
		switch {
		case x.Heads.Len() == 0:
			b = append(b, newGrid(x.Rows, heads, unset))
		case x.In == 0:
			b = append(b, own.heads(x.Heads))
		case x.In == i+1:
			b = append(b, newGrid(x.Rows, x.Heads.Len(), unset))
		default:
			b = append(b, b[x.In].box(Box{partition.Range{Hi: x.Rows}, partition.Range{Hi: x.Heads.Len()}}))
		}
	}
	return b
}

// An inbox holds the messages of a rank's hops, by peer. The first request gets the first message, whichever hop needs
// it first.
type inbox struct {
	asked map[int]int
	came  map[int][]grid
}

// A pass runs the hops of one rank, with the kernel's present pass.
type pass struct {
	*sim
	sch         *Schedule
	q, o        grid
	keys, grads []grid
	inbox
	turn  map[*Move]int // of moves in flight: the number among the peer's messages
	late  *Hop          // with transfers that outlast it
	calls int
	last  bool // a call was marked last
	ended bool // no pass has begun, or it is over
}

// start begins the transfers of a hop, and copies.
func (p *pass) start(h *Hop) {
	p.apart(h)
	p.begin(h.SendKV, h.RecvKV, p.keys)
	p.begin(h.SendGrad, h.RecvGrad, p.grads)
	p.copy(h.CopyKV, p.keys)
	p.copy(h.CopyGrad, p.grads)
}

func (p *pass) copy(list []Copy, bufs []grid) {
	for _, c := range list {
		src := bufs[c.Src.Buf].block(c.Src)
		bufs[c.Dst.Buf].block(c.Dst).set(func(i, j, _ int) int { return src[i][j] })
	}
}

// finish ends the transfers that a hop waits for, and folds. A pass's first hop waits for late ones.
func (p *pass) finish(h *Hop) {
	wait := h
	switch {
	case h.Late:
		p.late = h
		return
	case h.Begins && p.late != nil:
		wait, p.late = p.late, nil
	}
	p.end(wait.RecvKV, p.keys)
	p.end(wait.RecvGrad, p.grads)
	for _, f := range h.Fold {
		src := p.grads[f.Src.Buf].block(f.Src)
		p.grads[f.Dst.Buf].block(f.Dst).set(func(i, j, old int) int { return old + src[i][j] })
	}
}

// begin sends, and makes rows useless that something is on its way to.
func (p *pass) begin(send, recv []Move, bufs []grid) {
	for _, m := range send {
		p.wires[p.sch.Rank][m.Peer] <- bufs[m.Block.Buf].block(m.Block).clone()
	}
	for i := range recv {
		m := &recv[i]
		p.turn[m] = p.asked[m.Peer]
		p.asked[m.Peer]++
		bufs[m.Block.Buf].block(m.Block).set(func(_, _, _ int) int { return unset })
	}
}

func (p *pass) end(recv []Move, bufs []grid) {
	for i := range recv {
		m := &recv[i]
		for len(p.came[m.Peer]) <= p.turn[m] {
			p.came[m.Peer] = append(p.came[m.Peer], <-p.wires[m.Peer][p.sch.Rank])
		}
		p.put(p.sch.Rank, m.Peer, p.came[m.Peer][p.turn[m]], bufs[m.Block.Buf].block(m.Block),
			func(_, came int) int { return came })
	}
}

// A used value is rows and heads of a memory.
type used struct {
	Box
	in int
}

func (u used) meets(o used) bool {
	return u.in == o.in && u.Rows.Lo < o.Rows.Hi && o.Rows.Lo < u.Rows.Hi && u.Heads.Lo < o.Heads.Hi &&
		o.Heads.Lo < u.Heads.Hi
}

// uses returns the memory of a block.
func uses(list []Buffer, b Block) used {
	u := used{Box{partition.Range{Lo: b.Lo, Hi: b.Hi}, partition.Range{Hi: 1 << 30}}, b.Buf}
	if x := list[b.Buf]; x.Heads.Len() > 0 {
		if u.in = x.In; x.In == 0 {
			u.Heads = x.Heads
		}
	}
	return u
}

// apart finds memory that two things use at once during a hop, one of them writing: its transfers, late ones, copies and
// the call.
func (p *pass) apart(h *Hop) {
	check := func(list []Buffer, reads, writes []Block) {
		for i, w := range writes {
			for k, o := range append(reads[:len(reads):len(reads)], writes[:i]...) {
				if uses(list, w).meets(uses(list, o)) {
					p.failf("rank %d %s: %v is written while %v is in use (%d)", p.sch.Rank, h.Label, w, o, k)
				}
			}
		}
	}
	blocks := func(moves ...[]Move) (list []Block) {
		for _, m := range slices.Concat(moves...) {
			list = append(list, m.Block)
		}
		return list
	}
	reads, writes := blocks(h.SendKV), blocks(h.RecvKV)
	if p.late != nil {
		reads, writes = append(reads, blocks(p.late.SendKV)...), append(writes, blocks(p.late.RecvKV)...)
	}
	if len(h.Tiles) > 0 {
		reads = append(reads, h.Keys)
	}
	for _, c := range h.CopyKV {
		reads, writes = append(reads, c.Src), append(writes, c.Dst)
	}
	check(p.sch.KVBufs, reads, writes)
	reads, writes = blocks(h.SendGrad), blocks(h.RecvGrad)
	if h.Grads != (Block{}) {
		writes = append(writes, h.Grads)
	}
	for _, c := range h.CopyGrad {
		reads, writes = append(reads, c.Src), append(writes, c.Dst)
	}
	check(p.sch.GradBufs, reads, writes)
}

// compute runs a hop's call. It sets the rows of its gradients, the rank's own in the first hop also without tiles.
func (p *pass) compute(h *Hop, backward bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var grads grid
	if backward {
		fresh := h.fresh()
		p.grads[h.Grads.Buf].block(Block{Lo: fresh.Lo, Hi: fresh.Hi}).set(func(_, _, _ int) int { return 0 })
		grads = p.grads[h.Grads.Buf][:h.Grads.Hi]
	}
	if len(h.Tiles) == 0 {
		return
	}
	if p.ended || h.First != (p.calls == 0) || p.last {
		p.fault = fmt.Sprintf("rank %d: call %d is marked first %t, last %t; no pass: %t", p.sch.Rank, p.calls, h.First,
			h.Last, p.ended)
	}
	p.calls, p.last = p.calls+1, h.Last
	keys := p.keys[h.Keys.Buf][:h.Keys.Hi]
	for _, t := range h.Tiles {
		for i := t.Q.Lo; i < t.Q.Hi; i++ {
			for j := t.K.Lo; j < t.K.Hi; j++ {
				if t.Band.Sees(i, j) {
					p.meet(i, j, keys, grads)
				}
			}
		}
	}
}

// meet visits one pair of rows, in every head.
func (p *pass) meet(i, j int, keys, grads grid) {
	for a, name := range p.q[i] {
		// A kernel gives each head of keys to as many heads of queries as the next.
		b := a * len(keys[j]) / len(p.q[i])
		head, q, k := name%p.heads, name/p.heads, keys[j][b]/p.kvHeads
		if keys[j][b] < 0 || keys[j][b]%p.kvHeads != head*p.kvHeads/p.heads {
			if p.fault == "" {
				p.fault = fmt.Sprintf("rank %d computes query %d, head %d, with %d, which is no key of it", p.sch.Rank,
					q, head, keys[j][b])
			}
			continue
		}
		p.seen[pair{head, q, k}]++
		p.o[i][a] += mark(head, k)
		if grads != nil {
			grads[j][b] += mark(head, q)
		}
	}
}

// visible implements the definition of the mask, without bands over local indices or tiles.
func visible(m partition.Mask, i, j int) bool {
	if len(m.Slices) > 0 {
		return slices.ContainsFunc(m.Slices, func(t partition.Tile) bool {
			return i >= t.Q.Lo && i < t.Q.Hi && j >= t.K.Lo && j < t.K.Hi && t.Band.Sees(i, j)
		})
	}
	lo := 0
	for _, n := range m.Docs {
		if i >= lo && i < lo+n && (j < lo || j >= lo+n) {
			return false
		}
		lo += n
	}
	return m.Sees(i, j)
}
