package planner

import (
	"math"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// kind is what a step of a program does.
type kind uint8

const (
	compute kind = iota // for so many seconds
	copies              // likewise, of memory
	carry               // likewise, of cores that send
	begin               // an exchange
	wait                // for an exchange
	enter               // a hop
	leave               // it
)

// step is what a rank queues.
type step struct {
	kind     kind
	exchange int32   // of begin and wait; of enter: its label
	seconds  float64 // of compute, copies and carry
}

// message is what one exchange moves between two ranks, one way.
type message struct {
	peer    int
	sends   bool
	link    int // of the rank: 0 to its host, 1 to others
	seconds float64
	bytes   int64
}

// program is all that a rank does in a pass, in order.
type program struct {
	rank      int
	host      float64 // seconds to queue one thing
	steps     []step
	labels    []string // of hops
	exchanges [][]message
}

// compiler makes programs of schedules. It asks for the cost of equal calls once.
type compiler struct {
	a        Attention
	backward bool
	at       Place
	costs    Costs
	host     float64
	known    map[shapeKey]float64
	reuse    bool // of the programs that it makes only the last is used
	bare     bool // nobody asks for hops
	unlike   bool // no two calls are alike that are worth remembering

	p     *program
	room  []message // of exchanges so far, and room for more
	ends  []float64 // for lone
	slots []slot    // of each peer and direction
	lists uint32    // lists of messages that were begun
	most  int       // messages that one of them had
	// flights is exchanges by number, for those who wait for them.
	flights []int
	begun   []begun // of each hop
	// What was asked for last. Of no bytes nothing is.
	transfers [1 << places]remembered[transfer]
	copied    [1 << places]remembered[int64]
}

// slot is where a list has its message with a peer.
type slot struct {
	list uint32
	n    int32
}

func newCompiler(a Attention, backward bool, at Place, c Costs) *compiler {
	return &compiler{a: a, backward: backward, at: at, costs: c, host: c.Host(1), known: map[shapeKey]float64{}}
}

// forget leaves nothing of k but memory.
func (k *compiler) forget() {
	clear(k.known)
	if k.p != nil {
		clear(k.p.exchanges[:cap(k.p.exchanges)])
		clear(k.p.labels[:cap(k.p.labels)])
	}
	k.a, k.at, k.costs = Attention{}, Place{}, nil
	k.room = k.room[:0]
	clear(k.transfers[:])
	clear(k.copied[:])
}

// fewTiles is how many tiles a call has that are compared one by one. Those of documents have more, and are
// seldom alike but where groups of heads have the same.
const fewTiles = 4

// shapeKey is all that the cost of a call follows from.
type shapeKey struct {
	n              int
	tiles          [fewTiles]partition.Tile
	many           *partition.Tile // the first of more tiles
	heads, kvHeads int
	first, last    bool
	backward       bool
	backend        string
}

func (k *compiler) compile(s *ring.Schedule) *program {
	if k.p == nil || !k.reuse {
		k.p = &program{}
	} else {
		k.room = k.room[:0]
	}
	k.flights, k.begun = k.flights[:0], k.begun[:0]
	*k.p = program{rank: s.Rank, host: k.host, steps: k.p.steps[:0], labels: k.p.labels[:0], exchanges: k.p.exchanges[:0]}
	if s.Q != nil {
		k.there(s)
	}
	if s.Q == nil || s.Q.Heads > 0 {
		k.hops(s)
	}
	if s.Q != nil {
		k.back(s)
	}
	return k.p
}

func (k *compiler) add(s step) { k.p.steps = append(k.p.steps, s) }

func (k *compiler) enter(label string) {
	if !k.bare {
		k.add(step{kind: enter, exchange: int32(len(k.p.labels))})
		k.p.labels = append(k.p.labels, label)
	}
}

func (k *compiler) leave() {
	if !k.bare {
		k.add(step{kind: leave})
	}
}

// group is the heads that hops run with at a time.
type group struct{ q, kv int }

func (k *compiler) groups(s *ring.Schedule) []group {
	q, kv := k.a.Heads, k.a.KVHeads
	if s.Q != nil {
		q, kv = s.Q.Heads, s.KV.Heads
	}
	n := s.GatherHeads
	if n <= 0 || n >= kv {
		return []group{{q, kv}}
	}
	var list []group
	for lo := 0; lo < kv; lo += n {
		m := min(n, kv-lo)
		list = append(list, group{m * (q / kv), m})
	}
	return list
}

// hops queues the loops of package ring.
func (k *compiler) hops(s *ring.Schedule) {
	hops := s.Forward
	if k.backward {
		hops = s.Backward
	}
	if len(hops) == 0 {
		return
	}
	groups := k.groups(s)
	k.enter(hops[0].Label)
	next := k.prefetch(s, &hops[0], groups, 0)
	for g, heads := range groups {
		for i := range hops {
			h, flight := &hops[i], next
			if i > 0 || g > 0 {
				k.enter(h.Label)
			}
			if i > 0 {
				flight = k.begins(h, i, heads.kv)
			}
			k.beside(h, heads, flight)
			if i == 0 && g+1 < len(groups) {
				next = k.prefetch(s, &hops[0], groups, g+1)
			}
			if k.backward { // both passes may have the same hops
				for _, f := range h.Fold {
					k.copy(k.grads(f.Src.Hi-f.Src.Lo, heads.kv) * 3) // two are read, one is written
				}
			}
			k.leave()
		}
	}
}

// prefetch begins the exchanges of a group's first hop. The heads of several groups are copied for them.
func (k *compiler) prefetch(s *ring.Schedule, h *ring.Hop, groups []group, g int) []int {
	if len(groups) > 1 && s.KVRows[0] > 0 {
		k.copy(2 * k.keys(s.KVRows[0], groups[g].kv))
	}
	return k.begins(h, 0, groups[g].kv)
}

// begun is what beginning a hop with so many heads queued: from a step and a flight on to others.
type begun struct {
	kv             int
	steps, flights [2]int
}

// begins begins the exchanges of hop i: as for the group of heads before, where that was as large.
func (k *compiler) begins(h *ring.Hop, i, kv int) []int {
	for i >= len(k.begun) {
		k.begun = append(k.begun, begun{})
	}
	b := &k.begun[i]
	if b.kv != kv {
		*b = begun{kv, [2]int{len(k.p.steps)}, [2]int{len(k.flights)}}
		flight := k.begin(h, kv)
		b.steps[1], b.flights[1] = len(k.p.steps), len(k.flights)
		return flight
	}
	first, further := len(k.flights), 0
	for _, n := range k.flights[b.flights[0]:b.flights[1]] {
		if n >= 0 {
			further = len(k.p.exchanges) - n
			k.p.exchanges = append(k.p.exchanges, k.p.exchanges[n])
			n += further
		}
		k.flights = append(k.flights, n)
	}
	for _, s := range k.p.steps[b.steps[0]:b.steps[1]] {
		if s.kind == begin {
			s.exchange += int32(further) // as many for each: they were numbered one behind another
		}
		k.add(s)
	}
	return k.flights[first:]
}

// begin begins the exchanges of a hop, those of further calls first, and returns them; -1 stands for one of
// nothing.
func (k *compiler) begin(h *ring.Hop, kv int) []int {
	first := len(k.flights)
	for i := range h.Then {
		list := k.moves(k.list(), h.Then[i].SendKV, true, k.keys(1, kv))
		k.flights = append(k.flights, k.exchange(k.moves(list, h.Then[i].RecvKV, false, k.keys(1, kv))))
	}
	list := k.moves(k.list(), h.SendKV, true, k.keys(1, kv))
	list = k.moves(list, h.RecvKV, false, k.keys(1, kv))
	if k.backward {
		list = k.moves(list, h.SendGrad, true, k.grads(1, kv))
		list = k.moves(list, h.RecvGrad, false, k.grads(1, kv))
	}
	k.flights = append(k.flights, k.exchange(list))
	return k.flights[first:]
}

// moves adds what is sent or received, one message for each peer, in the order of the first move to it. The
// count of messages waits in seconds until exchange.
func (k *compiler) moves(list []message, moves []ring.Move, sends bool, row int64) []message {
	for i := range moves {
		m := &moves[i]
		if m.Peer == k.p.rank { // a copy, counted where it arrives
			if !sends {
				k.copy(2 * int64(m.Block.Hi-m.Block.Lo) * row)
			}
			continue
		}
		list = k.toward(list, m.Peer, sends, int64(m.Block.Hi-m.Block.Lo)*row, 2*k.a.Batch)
	}
	return list
}

func (k *compiler) toward(list []message, peer int, sends bool, bytes int64, messages int) []message {
	at := 2 * peer
	if sends {
		at++
	}
	if at >= len(k.slots) {
		k.slots = append(k.slots, make([]slot, at+1-len(k.slots))...)
	}
	x := &k.slots[at]
	if x.list != k.lists {
		*x = slot{k.lists, int32(len(list))}
		list = append(list, message{peer: peer, sends: sends})
	}
	m := &list[x.n]
	m.bytes += bytes
	m.seconds += float64(messages)
	return list
}

// list is room for the messages of one more exchange: for as many as any had so far.
func (k *compiler) list() []message {
	if k.lists++; cap(k.room)-len(k.room) < max(k.most, 16) {
		k.room = make([]message, 0, max(2*cap(k.room), 4*k.most, 256))
	}
	return k.room[len(k.room):]
}

// exchange is the number of an exchange that begins here, or -1 where nothing moves.
func (k *compiler) exchange(list []message) int {
	if len(list) == 0 {
		return -1
	}
	own := k.at.host(k.p.rank)
	for i := range list {
		m := &list[i]
		if k.at.host(m.peer) != own {
			m.link = 1
		}
		m.seconds = k.transfer(m)
	}
	if k.at.Shared {
		k.carry(list)
	}
	if n := len(k.room) + len(list); n <= cap(k.room) {
		k.room = k.room[:n]
	} // else it has grown out of it
	k.most = max(k.most, len(list))
	k.p.exchanges = append(k.p.exchanges, list[:len(list):len(list)])
	n := len(k.p.exchanges) - 1
	k.add(step{kind: begin, exchange: int32(n)})
	return n
}

// transfer is what the time of messages follows from: ranks of a host are alike, and so are those of different ones.
type transfer struct {
	link     int
	bytes    int64
	messages float64
}

// remembered is an answer, and what was asked.
type remembered[T comparable] struct {
	asked   T
	seconds float64
}

// places is the logarithm of how many answers are remembered, each where it is found without a search.
const places = 10

// place is where the answer about so many bytes is kept.
func place(bytes int64) uint64 {
	const spread = 0x9e3779b97f4a7c15 // of Fibonacci hashing
	return uint64(bytes) * spread >> (64 - places)
}

// transfer is the seconds of a message. Both passes send the same rows, and blocks go on as they came.
func (k *compiler) transfer(m *message) float64 {
	t := transfer{m.link, m.bytes, m.seconds}
	x := &k.transfers[place(2*m.bytes+int64(m.link))]
	if x.asked != t {
		from, to := k.at.First+k.p.rank, k.at.First+m.peer
		if !m.sends {
			from, to = to, from
		}
		*x = remembered[transfer]{t, k.costs.Exchange(from, to, m.bytes, int(m.seconds))}
	}
	return x.seconds
}

// carry has the cores do what links do elsewhere: all that the rank sends, with no core left to compute beside it.
func (k *compiler) carry(list []message) {
	total := 0.0
	for i := range list {
		if list[i].sends {
			total += list[i].seconds
		}
		list[i].seconds = 0
	}
	k.add(step{kind: carry, seconds: total})
}

func (k *compiler) wait(exchange int) {
	if exchange >= 0 {
		k.add(step{kind: wait, exchange: int32(exchange)})
	}
}

// beside queues a hop's calls beside its exchanges, as Hop.beside does.
func (k *compiler) beside(h *ring.Hop, heads group, flight []int) {
	k.call(h.Tiles, h.First, h.Last, h.Grads, heads)
	for i := range h.Then {
		t := &h.Then[i]
		k.wait(flight[i])
		k.call(t.Tiles, t.First, t.Last, t.Grads, heads)
	}
	k.wait(flight[len(flight)-1])
}

// call queues one kernel call. A backward one without tiles sets gradients to zero.
func (k *compiler) call(tiles []partition.Tile, first, last bool, grads ring.Block, heads group) {
	if len(tiles) == 0 {
		if k.backward && grads.Hi > grads.Lo {
			k.copy(k.grads(grads.Hi-grads.Lo, heads.kv)) // written, not read
		}
		return
	}
	a := &k.a
	k.add(step{kind: compute, seconds: k.seconds(&Call{
		Backend: a.Backend, DType: a.DType, Backward: k.backward, Deterministic: a.Deterministic,
		Batch: a.Batch, Heads: heads.q, KVHeads: heads.kv, Dim: a.Dim, DimV: a.DimV, Tiles: tiles, First: first, Last: last,
	})})
}

// seconds is what a call takes.
func (k *compiler) seconds(c *Call) float64 {
	if k.unlike {
		return k.ask(c)
	}
	key := shapeKey{n: len(c.Tiles), heads: c.Heads, kvHeads: c.KVHeads, first: c.First, last: c.Last, backward: c.Backward, backend: c.Backend}
	if len(c.Tiles) <= fewTiles {
		copy(key.tiles[:], c.Tiles)
	} else {
		key.many = &c.Tiles[0]
	}
	t, ok := k.known[key]
	if !ok {
		t = k.ask(c)
		k.known[key] = t
	}
	return t
}

// ask asks for the cost of a call.
func (k *compiler) ask(c *Call) float64 {
	t := k.costs.Call(*c)
	if math.IsNaN(t) {
		return math.Inf(1)
	}
	return t
}

func (k *compiler) copy(bytes int64) {
	if bytes <= 0 {
		return
	}
	x := &k.copied[place(bytes)]
	if x.asked != bytes {
		*x = remembered[int64]{bytes, k.costs.Copy(bytes)}
	}
	k.add(step{kind: copies, seconds: x.seconds})
}

// sum is the bytes of an element of what is summed: gradients and LSE.
func (a *Attention) sum() int64 {
	if a.DType == tensor.F64 {
		return int64(tensor.F64.Size())
	}
	return int64(tensor.F32.Size())
}

// keys is the bytes of rows of K and V of so many heads.
func (k *compiler) keys(rows, heads int) int64 {
	return int64(rows) * int64(heads) * int64(k.a.Batch) * int64(k.a.Dim+k.a.DimV) * int64(k.a.DType.Size())
}

// grads is the bytes of rows of dK and dV of so many heads.
func (k *compiler) grads(rows, heads int) int64 {
	return int64(rows) * int64(heads) * int64(k.a.Batch) * int64(k.a.Dim+k.a.DimV) * k.a.sum()
}
