package ring

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/cprun/cprun/partition"
)

// Block is rows [Lo, Hi) of buffer Buf of keys and values, or of their gradients. Buffer 0
// is the rank's own block; the others are workspace.
type Block struct{ Buf, Lo, Hi int }

// Move is a block to or from a peer. One of a rank to itself is a copy, for which the rank needs a Mover.
type Move struct {
	Peer  int
	Block Block
}

// Fold adds Src to Dst, both blocks of gradients.
type Fold struct{ Dst, Src Block }

// Part is a further kernel call of a hop, with keys of its own. Its transfers are an exchange of
// their own: the call begins when these rows have arrived, whatever else is still on its way.
type Part struct {
	Keys        Block
	Tiles       []partition.Tile // none: only transfers
	From        []Source         // as in Hop
	First, Last bool             // as in Hop

	SendKV, RecvKV []Move // ended before the call begins

	Grads Block // as in Hop
}

// Hop is one turn of the loop: transfers begin, kernel calls run beside them, and all have ended
// before the next hop begins. The gradient fields are used by Backward alone.
type Hop struct {
	Label string
	Keys  Block            // the rows that Tiles index, as a whole block of Buf
	Tiles []partition.Tile // empty: no kernel call, except that hop 0 still zeroes the rank's own gradients
	From  []Source         // the owners of the rows of Keys, in order
	// First says that no call with tiles comes before this one, Last that none comes after.
	First, Last bool

	SendKV, RecvKV []Move // keys and values for later hops
	// Early lets the only call of the next hop begin before the rows of RecvKV have arrived, if its kernel waits for rows by
	// itself (attention.Waiter) and the transfer opens gates for it (comm.Gated). Else they are waited for at the end of the hop.
	Early bool

	Grads              Block // the rows that the call sets to its dK, dV; no other hop has written them before
	SendGrad, RecvGrad []Move
	Fold               []Fold // in order, when the calls and the transfers have ended

	// Then lists further calls, after the call of Tiles. All exchanges of a hop begin before its first call: first the
	// exchanges of Then, in order, then the hop's own. Ranks pair them up by that order: part i of a hop sends to
	// part i of a peer's.
	Then []Part
}

// Calls yields the kernel calls of a hop in order, the call of Tiles first.
func (h *Hop) Calls(yield func(*Part) bool) {
	if len(h.Tiles) > 0 && !yield(h.own()) {
		return
	}
	for i := range h.Then {
		if len(h.Then[i].Tiles) > 0 && !yield(&h.Then[i]) {
			return
		}
	}
}

// own returns the hop's own call, the first.
func (h *Hop) own() *Part {
	return &Part{Keys: h.Keys, Tiles: h.Tiles, From: h.From, First: h.First, Last: h.Last, Grads: h.Grads}
}

func (h *Hop) empty() bool {
	return len(h.Tiles)+len(h.SendKV)+len(h.RecvKV)+len(h.SendGrad)+len(h.RecvGrad)+len(h.Fold)+len(h.Then) == 0
}

// forward reports whether a forward pass has something to do in it.
func (h *Hop) forward() bool { return len(h.Tiles)+len(h.SendKV)+len(h.RecvKV)+len(h.Then) > 0 }

// foldsFirst reports whether the first use of the gradients of c, the hop's last call, adds to them.
func (h *Hop) foldsFirst(c *Part) bool { return len(h.Fold) > 0 && h.Fold[0].Dst.Buf == c.Grads.Buf }

// Schedule is one rank's part of one attention over all ranks, as data: the loops in ring.go run it
// hop by hop. It is a pure function of the partition, so ranks need not exchange it.
type Schedule struct {
	Algorithm string
	Rank      int
	Shape     partition.Shape // the hops' partition: over the groups that trade heads, else over the ranks
	Part      int             // the rank of Shape that the hops compute for: its group, else Rank
	Forward   []Hop
	Backward  []Hop
	KVRows    []int // rows of each K/V buffer; KVRows[0] is the own block
	GradRows  []int // rows of each dK/dV buffer, likewise

	// Q and KV trade heads for rows before the hops, and back after them: the hops then work on the
	// gathered rows. nil: the hops work on the rank's own rows and on all heads.
	Q, KV *Exchange

	// GatherHeads is the number of heads of keys that the hops work on at a time: they run once for each
	// group, and the transfers of a group's first hop run beside the calls of the group before. 0: all. The first hops of both passes move no gradients then.
	GatherHeads int
}

// Box is rows of some heads.
type Box struct{ Rows, Heads partition.Range }

// HeadMove is a box to or from a peer. A peer that is the rank itself is a copy.
type HeadMove struct {
	Peer int
	Box  Box
	// Adds is for boxes to send: on their way back they are added to the boxes before them in the list.
	// It is set if several ranks compute with one head of keys.
	Adds bool
}

// Exchange trades heads for rows with some ranks: of [own rows, all heads] it makes [Rows, Heads].
// After the hops it runs in reverse, in the same order: it sends the boxes of Recv and receives the
// boxes of Send. Q's takes q and dO there and O, LSE and dQ back; KV's takes K and V
// there and dK and dV back.
type Exchange struct {
	Rows, Heads int
	First       int        // of Q: the first of those heads, for values that a softmax has for each head
	Send        []HeadMove // boxes of the rank's own tensor; without Adds, they cover it once
	Recv        []HeadMove // boxes of the result; they cover it once
}

// computes reports whether the rank has heads to compute with. With more ranks than heads some have
// none: they only give and take.
func (s *Schedule) computes() bool { return s.Q == nil || s.Q.Heads > 0 }

// Algorithms are the exchange patterns that New knows.
var Algorithms = []string{"ring", "allgather", "ulysses", "hierarchical"}

// Spec is one attention over ranks: its positions, and its heads if an algorithm needs them. Its Mask must be set:
// see partition.Mask.
type Spec struct {
	partition.Shape
	Heads, KVHeads int // of q, and of k and v; ulysses and hierarchical trade them
	Inner          int // of hierarchical: neighbouring ranks that trade heads with each other, a divisor of Size
	GatherHeads    int // of allgather: heads of k and v that are gathered at a time; 0: all
	// Gather says when rows that are fetched in one hop, by allgather or in a window, travel: Beside, which ""
	// means, Before or Auto.
	Gather string
}

// When rows travel that are fetched in one hop.
const (
	// Beside is while the rank computes with its own keys. A second kernel call computes with what came.
	Beside = "beside"
	// Before is before the only kernel call. Rows of others and copies of the own ones lie together, in the order
	// of the sequence, and the rank needs a Mover.
	Before = "before"
	// Auto is Before in the forward pass of packed documents, and Beside otherwise. Few rows of documents travel,
	// and one call beside none is faster than two. cuDNN's backward pass is not: it computes all pairs of a
	// rectangle with more keys than queries, also masked ones.
	Auto = "auto"
)

// Gathers are the values of Spec.Gather.
var Gathers = []string{Beside, Before, Auto}

// New returns the schedule of rank under that algorithm.
func New(algorithm string, s Spec, rank int) (*Schedule, error) {
	p, err := newPlanner(algorithm, s)
	if err != nil {
		return nil, err
	}
	return p.Schedule(rank), nil
}

// All returns the schedules of every rank.
func All(algorithm string, s Spec) ([]*Schedule, error) {
	p, err := NewPlanner(algorithm, s)
	if err != nil {
		return nil, err
	}
	all := make([]*Schedule, s.Size)
	for r := range all {
		all[r] = p.Schedule(r)
	}
	return all, nil
}

// Planner makes the schedules of one partition, from the rows that ranks need of each other. It is read-only: goroutines may share it.
type Planner struct {
	algorithm string
	spec      Spec
	shape     partition.Shape                  // over the groups of inner ranks
	inner     int                              // ranks that trade heads; 1: none do
	index     *partition.Index                 // of the groups of inner ranks
	size      int                              // how many they are
	halo      bool                             // rows of others are fetched in one hop
	before    struct{ forward, backward bool } // ... and before the only kernel call of that pass
	pattern   func(*Planner, int) *Schedule
	table     [][]stop // of each owner and hop; nil: not kept
}

// NewPlanner returns a planner for a caller that asks for many ranks, and need not keep all their
// schedules: there are ranks times ranks hops. It asks every pair of ranks once.
func NewPlanner(algorithm string, s Spec) (*Planner, error) {
	p, err := newPlanner(algorithm, s)
	if err == nil {
		p.remember()
	}
	return p, err
}

// NewIndexedPlanner returns a planner for a caller that asks under several algorithms. index is one of s.Shape, best a prepared
// one; groups of ranks that trade heads have one of their own. all says that every rank is asked for.
func NewIndexedPlanner(algorithm string, s Spec, index *partition.Index, all bool) (*Planner, error) {
	p, err := newPlannerBy(algorithm, s, func(shape partition.Shape) *partition.Index {
		if shape.Size == s.Size {
			return index
		}
		return partition.NewIndex(shape)
	})
	if err == nil && all {
		p.remember()
	}
	return p, err
}

// Traders returns how many ranks trade heads with each other: all, or inner, or, with most algorithms,
// 1: none.
func Traders(algorithm string, ranks, inner int) int {
	switch algorithm {
	case "ulysses":
		return ranks
	case "hierarchical":
		return inner
	}
	return 1
}

// patterns makes the schedules of each of Algorithms.
var patterns = map[string]func(*Planner, int) *Schedule{
	"ring":         (*Planner).ring,
	"allgather":    (*Planner).allgather,
	"ulysses":      (*Planner).trading,
	"hierarchical": (*Planner).trading,
}

func newPlanner(algorithm string, s Spec) (*Planner, error) {
	return newPlannerBy(algorithm, s, partition.NewIndex)
}

// newPlannerBy makes a planner by the index of the groups that trade heads.
func newPlannerBy(algorithm string, s Spec, index func(partition.Shape) *partition.Index) (*Planner, error) {
	pattern, ok := patterns[algorithm]
	if !ok {
		return nil, fmt.Errorf("algorithm %q is none of %v", algorithm, Algorithms)
	}
	if err := s.Mask.Check(); err != nil {
		return nil, err
	}
	p := &Planner{algorithm: algorithm, spec: s, inner: Traders(algorithm, s.Size, s.Inner), pattern: pattern}
	if p.inner < 1 || s.Size%p.inner != 0 {
		return nil, fmt.Errorf("algorithm %s: groups of %d ranks do not make up %d", algorithm, p.inner, s.Size)
	}
	shape := s.Shape
	if p.inner > 1 {
		if s.KVHeads < 1 || s.Heads%s.KVHeads != 0 || s.Heads < 1 {
			return nil, fmt.Errorf("algorithm %s trades heads: %d of q are no multiple of %d of k and v", algorithm, s.Heads, s.KVHeads)
		}
		shape.Size, shape.Layout = s.Size/p.inner, gathered{s.Layout, p.inner}
	}
	p.index, p.shape, p.size = index(shape), shape, shape.Size
	p.halo = p.index.Halo()
	switch s.Gather {
	case Before:
		p.before.forward, p.before.backward = p.size > 1, p.size > 1
	case Auto:
		p.before.forward = p.size > 1 && len(shape.Mask.Docs) > 1
	case Beside, "":
	default:
		return nil, fmt.Errorf("rows that are gathered travel %q; want one of %v", s.Gather, Gathers)
	}
	return p, nil
}

// Schedule returns the schedule of rank, the same that New returns.
func (p *Planner) Schedule(rank int) *Schedule {
	s := p.pattern(p, rank)
	if s.Algorithm = p.algorithm; s.Algorithm == "allgather" && p.size > 1 {
		s.GatherHeads = p.spec.GatherHeads
	}
	return s
}

// own returns hop 0 of every algorithm: the rank's queries against its own keys.
func (p *Planner) own(rank int) Hop {
	whole := Block{0, 0, p.index.Keys(rank)}
	return Hop{Label: p.hopLabel(0, rank), Keys: whole, Grads: whole, Tiles: p.index.Tiles(rank, rank), From: from(rank, whole.Hi)}
}

// from returns the first rows of an owner's keys, as they lie in a buffer.
func from(owner, rows int) []Source {
	return []Source{{Rank: owner, Rows: partition.Range{Hi: rows}}}
}

func (p *Planner) hopLabel(h, owner int) string {
	var b [48]byte
	label, of := strconv.AppendInt(append(b[:0], "hop "...), int64(h), 10), " owner "
	if p.inner > 1 {
		of = " group "
	}
	return string(strconv.AppendInt(append(label, of...), int64(owner), 10))
}

func move(peer, buf int, r partition.Range) Move { return Move{peer, Block{buf, r.Lo, r.Hi}} }

// rows holds the number of rows of each buffer.
type rows []int

// hold makes room for a block.
func (r *rows) hold(b Block) {
	for b.Buf >= len(*r) {
		*r = append(*r, 0)
	}
	(*r)[b.Buf] = max((*r)[b.Buf], b.Hi)
}

func (r *rows) holdAll(send, recv []Move) {
	for i := range send {
		r.hold(send[i].Block)
	}
	for i := range recv {
		r.hold(recv[i].Block)
	}
}

// finish drops the hops in which a rank has nothing to do and sizes the buffers: buffer 0 has the
// rank's own rows, workspace the rows that its blocks reach.
//
// Where Forward is nil, the forward pass is the backward pass without gradients.
func (p *Planner) finish(s *Schedule) *Schedule {
	// The first hop sets the own gradients, and one hop at least ends the pass.
	s.Backward = s.Backward[:1+len(compact(s.Backward[1:]))]
	markEnds(s.Backward)
	if s.Forward == nil {
		s.Forward = p.forwardOf(s.Backward)
	} else {
		s.Forward = compact(s.Forward)
		markEnds(s.Forward)
	}
	s.Shape, s.Part = p.shape, s.Rank
	kv, grads := rows{p.index.Keys(s.Rank)}, rows{p.index.Keys(s.Rank)}
	s.each(func(h *Hop) { h.hold(&kv, &grads) })
	s.KVRows, s.GradRows = kv, grads
	return s
}

// each calls f for every hop of both passes, once for a hop that they share.
func (s *Schedule) each(f func(*Hop)) {
	own := len(s.Forward)
	if own > 0 && &s.Forward[own-1] == &s.Backward[len(s.Backward)-1] {
		own = 0
	}
	for i := range s.Forward[:own] {
		f(&s.Forward[i])
	}
	for i := range s.Backward {
		f(&s.Backward[i])
	}
}

// hold makes room for the blocks of a hop.
func (h *Hop) hold(kv, grads *rows) {
	kv.hold(h.Keys)
	kv.holdAll(h.SendKV, h.RecvKV)
	grads.hold(h.Grads)
	grads.holdAll(h.SendGrad, h.RecvGrad)
	for j := range h.Then {
		kv.hold(h.Then[j].Keys)
		kv.holdAll(h.Then[j].SendKV, h.Then[j].RecvKV)
		grads.hold(h.Then[j].Grads)
	}
}

// compact moves the hops that are not empty together.
func compact(hops []Hop) []Hop {
	return slices.DeleteFunc(hops, func(h Hop) bool { return h.empty() })
}

// markEnds marks the first and the last call with tiles.
func markEnds(hops []Hop) {
	var first, last *bool
	mark := func(tiles []partition.Tile, isFirst, isLast *bool) {
		if len(tiles) == 0 {
			return
		}
		if last = isLast; first == nil {
			first = isFirst
		}
	}
	for i := range hops {
		h := &hops[i]
		mark(h.Tiles, &h.First, &h.Last)
		for j := range h.Then {
			mark(h.Then[j].Tiles, &h.Then[j].First, &h.Then[j].Last)
		}
	}
	if first != nil {
		*first, *last = true, true
	}
}

// forwardOf returns the hops of a backward schedule without transfers of gradients, and without hops that are then empty.
func (p *Planner) forwardOf(hops []Hop) []Hop {
	n := 0
	for i := range hops {
		if hops[i].forward() {
			n++
		}
	}
	out := make([]Hop, 0, n)
	for i := range hops {
		h := &hops[i]
		if !h.forward() {
			continue
		}
		f := Hop{Label: h.Label, Keys: h.Keys, Tiles: h.Tiles, From: h.From, First: h.First, Last: h.Last, SendKV: h.SendKV, RecvKV: h.RecvKV, Early: h.Early}
		for _, p := range h.Then {
			p.Grads = Block{}
			f.Then = append(f.Then, p)
		}
		out = append(out, f)
	}
	return out
}
