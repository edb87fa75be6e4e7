// Package ring computes attention over the ranks that share a sequence: K and V of other ranks travel while kernels
// compute with the rows that are there. A Schedule is one rank's part, as data. New makes it, and Ring runs it hop by
// hop, on any device:
//
//	schedule, err := ring.New("ring", ring.Spec{Shape: shape}, rank)
//	loop := ring.Ring{Kernel: kernel, Comm: group, Stream: stream, Arena: arena}
//	err = loop.Forward(out, q, k, v, schedule, attention.Softmax{Scale: scale})
//
// ring.go holds the loop; docs/concepts/schedules.md shows the algorithms as schedules.
package ring

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Buffer is room for rows of K and V, or of their gradients. Buffer 0 is the rank's own tensor, the others are
// workspace.
type Buffer struct {
	Rows int
	// Heads are the KV heads of a buffer of one group, in the memory of buffer In: the rank's own tensor (0), the
	// buffer itself, or one that an earlier group used. No heads: a buffer of all, with memory of its own.
	Heads partition.Range
	In    int
}

// Block is rows [Lo, Hi) of buffer Buf.
type Block struct{ Buf, Lo, Hi int }

func (b Block) rows() partition.Range { return partition.Range{Lo: b.Lo, Hi: b.Hi} }

// Move is a block to or from a peer.
type Move struct {
	Peer  int
	Block Block
}

// Copy sets Dst to Src, both blocks of one kind. It needs a Mover.
type Copy struct{ Dst, Src Block }

// Fold adds Src to Dst, both blocks of gradients.
type Fold = Copy

// Hop is one turn of the loop: transfers begin, a kernel call runs beside them, and both have ended before the next hop
// begins. Backward alone uses the gradient fields.
type Hop struct {
	Label string // in traces: "hop 1 owner 0"

	Begins, Ends bool             // a kernel pass: one a schedule, or one for each group of heads
	Keys         Block            // the rows that Tiles index
	Tiles        []partition.Tile // none: no kernel call, except that hop 0 still zeroes the rank's own gradients
	Columns      []int            // with Spec.Positions, the position of each row of Keys
	First, Last  bool             // no call with tiles comes before this one in its pass, or after it

	SendKV, RecvKV []Move // K and V for later hops
	CopyKV         []Copy // beside the transfers
	// Late transfers end in the next pass, whose first hop waits for them.
	Late bool
	// Gated lets the next call begin before the rows that this hop waits for, if its kernel waits for rows by itself
	// (attention.Waiter) and the transfer has gates (comm.Gated).
	Gated bool

	Grads              Block // the rows that the call sets to its dK, dV
	Held               int   // but it adds to rows of Grads before this one, which an earlier hop has set
	SendGrad, RecvGrad []Move
	CopyGrad           []Copy
	Fold               []Fold // in order, after the call and the transfers
}

// forward reports whether a forward pass does anything in the hop.
func (h *Hop) forward() bool { return len(h.Tiles)+len(h.SendKV)+len(h.RecvKV)+len(h.CopyKV) > 0 }

// fresh returns the rows of Grads that no hop has written before.
func (h *Hop) fresh() partition.Range {
	return partition.Range{Lo: min(max(h.Grads.Lo, h.Held), h.Grads.Hi), Hi: h.Grads.Hi}
}

func (h *Hop) empty() bool {
	return !h.forward() && len(h.SendGrad)+len(h.RecvGrad)+len(h.CopyGrad)+len(h.Fold) == 0
}

// blocks calls kv for each block of K and V, and grad for each of gradients.
func (h *Hop) blocks(kv, grad func(*Block)) {
	moves := func(list []Move, f func(*Block)) {
		for i := range list {
			f(&list[i].Block)
		}
	}
	copies := func(list []Copy, f func(*Block)) {
		for i := range list {
			f(&list[i].Dst)
			f(&list[i].Src)
		}
	}
	kv(&h.Keys)
	moves(h.SendKV, kv)
	moves(h.RecvKV, kv)
	copies(h.CopyKV, kv)
	grad(&h.Grads)
	moves(h.SendGrad, grad)
	moves(h.RecvGrad, grad)
	copies(h.CopyGrad, grad)
	copies(h.Fold, grad)
}

// Schedule is one rank's part of one attention over all ranks. It is a pure function of the partition, so ranks need
// not exchange it.
type Schedule struct {
	Algorithm string
	Rank      int
	Forward   []Hop
	Backward  []Hop
	KVBufs    []Buffer // of K and V
	GradBufs  []Buffer // of their gradients
	Rows      []int    // with Spec.Positions, the position of each query among the keys

	// Q and KV exchange heads for rows before the hops, and back after them: the hops then work on the gathered rows.
	// nil: the hops work on the rank's own rows and on all heads.
	Q, KV *Exchange

	// GatherHeads is the number of KV heads of the first and largest group; 0: all heads are one pass.
	GatherHeads int
}

// Box is rows of some heads.
type Box struct{ Rows, Heads partition.Range }

// A headMove is a box to or from a peer, or a copy if the peer is the rank itself.
type headMove struct {
	Peer int
	Box  Box
	// Adds is for boxes to send: on their way back they are added to the boxes before them in the list.
	// It is set if several ranks compute with one head of keys.
	Adds bool
}

// Exchange is an all-to-all that exchanges heads for rows: from [own rows, all heads] it makes [Rows, Heads]. After the
// hops it runs in reverse, in the same order: it sends the boxes of Recv and receives the boxes of Send. Q's scatters
// the heads of q and gathers those of O, LSE and dQ; KV's scatters K and V and gathers dK and dV.
type Exchange struct {
	Rows, Heads int
	First       int        // of Q: the first of those heads, for values that a softmax has for each head
	Send        []headMove // boxes of the rank's own tensor; without Adds, they cover it once
	Recv        []headMove // boxes of the result; they cover it once
}

// Algorithms are the exchange patterns that New knows.
var Algorithms = []string{"ring", "allgather", "ulysses", "hierarchical"}

// Spec is one attention over ranks: its positions, and its heads if an algorithm needs them. Its Mask must be set:
// see partition.Mask.
type Spec struct {
	partition.Shape
	Heads, KVHeads int // of q, and of k and v; ulysses and hierarchical exchange them
	Inner          int // of hierarchical: neighbouring ranks that exchange heads, a divisor of Size
	GatherHeads    int // of allgather: heads of k and v that are gathered at a time; 0: all
	// Split computes the own keys of a backward pass in two calls, the second beside the gradients on their way home.
	Split bool
	// Gather says when rows that are fetched in one hop, by allgather or in a window, travel: Beside, which ""
	// means, Before or Auto.
	Gather string
	// Positions fills in Schedule.Rows and Hop.Columns, for slopes or a bias.
	Positions bool
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
	p, err := NewPlanner(algorithm, s)
	if err != nil {
		return nil, err
	}
	return p.Schedule(rank), nil
}

// Planner makes the schedules of one partition, from the rows that ranks need of each other. Goroutines may share it.
type Planner struct {
	algorithm string
	spec      Spec
	shape     partition.Shape                  // over the groups of inner ranks
	degree    int                              // ranks that exchange heads; 1: none
	index     *partition.Index                 // of the groups of inner ranks
	size      int                              // how many they are
	halo      bool                             // rows of others are fetched in one hop
	before    struct{ forward, backward bool } // ... and before the only kernel call of that pass
	table     [][]visit                        // of each owner and hop; nil: not prepared
}

// UlyssesDegree returns how many ranks exchange heads with each other: all, or inner, or 1: none.
func UlyssesDegree(algorithm string, ranks, inner int) int {
	switch algorithm {
	case "ulysses":
		return ranks
	case "hierarchical":
		return inner
	}
	return 1
}

// NewPlanner returns a planner for a caller that need not keep all schedules: there are ranks times ranks hops. One
// that asks for many ranks should call Prepare first.
func NewPlanner(algorithm string, s Spec) (*Planner, error) {
	p, err := newPlanner(algorithm, s)
	if err == nil {
		p.index = partition.NewIndex(p.shape)
		p.halo = p.index.Halo()
	}
	return p, err
}

// NewIndexedPlanner returns a planner for a caller that asks under several algorithms. index is one of s.Shape, best a
// prepared one. Groups of ranks that exchange heads do not use it, but one of their own.
func NewIndexedPlanner(algorithm string, s Spec, index *partition.Index) (*Planner, error) {
	if UlyssesDegree(algorithm, s.Size, s.Inner) != 1 {
		return NewPlanner(algorithm, s)
	}
	p, err := newPlanner(algorithm, s)
	if err == nil {
		p.index, p.halo = index, index.Halo()
	}
	return p, err
}

// newPlanner returns a planner without an index.
func newPlanner(algorithm string, s Spec) (*Planner, error) {
	if !slices.Contains(Algorithms, algorithm) {
		return nil, fmt.Errorf("algorithm %q is none of %v", algorithm, Algorithms)
	}
	if err := s.Mask.Check(); err != nil {
		return nil, err
	}
	p := &Planner{algorithm: algorithm, spec: s, degree: UlyssesDegree(algorithm, s.Size, s.Inner)}
	if p.degree < 1 || s.Size%p.degree != 0 {
		return nil, fmt.Errorf("algorithm %s: groups of %d ranks do not make up %d", algorithm, p.degree, s.Size)
	}
	if algorithm == "allgather" && s.GatherHeads > 0 && s.KVHeads < 1 {
		return nil, fmt.Errorf("allgather of %d heads at a time needs Spec.KVHeads", s.GatherHeads)
	}
	shape := s.Shape
	if p.degree > 1 {
		if s.KVHeads < 1 || s.Heads%s.KVHeads != 0 || s.Heads < 1 {
			return nil, fmt.Errorf("algorithm %s exchanges heads: %d of q are not a multiple of %d of k and v",
				algorithm, s.Heads, s.KVHeads)
		}
		shape.Size, shape.Layout = s.Size/p.degree, gathered{s.Layout, p.degree}
	}
	p.shape, p.size = shape, shape.Size
	switch s.Gather {
	case Before:
		p.before.forward, p.before.backward = p.size > 1, p.size > 1
	case Auto:
		p.before.forward = p.size > 1 && len(shape.Mask.Docs) > 1
	case Beside, "":
	default:
		return nil, fmt.Errorf("Spec.Gather is %q; want one of %v", s.Gather, Gathers)
	}
	return p, nil
}

// Schedule returns the schedule of rank, the same that New returns.
func (p *Planner) Schedule(rank int) *Schedule {
	plan := p.ulysses // over groups of one, this is the ring
	if p.algorithm == "allgather" {
		plan = p.allgather
	}
	s := plan(rank)
	s.Algorithm = p.algorithm
	return s
}

// own returns hop 0 of every algorithm: the rank's queries against its own keys.
func (p *Planner) own(rank int) Hop {
	whole := Block{0, 0, p.index.Keys(rank)}
	return Hop{
		Label: p.hopLabel(0, rank), Keys: whole, Grads: whole, Tiles: p.index.Tiles(rank, rank),
		Columns: p.columns(nil, rank, partition.Range{Hi: whole.Hi}),
	}
}

// columns adds the positions of rows of an owner's keys, if somebody asks for them.
func (p *Planner) columns(to []int, owner int, rows partition.Range) []int {
	if !p.spec.Positions {
		return nil
	}
	s := &p.shape
	return append(to, partition.Positions(s.Layout.Spans(s.SeqKV, s.Size, owner))[rows.Lo:rows.Hi]...)
}

// rows returns the position of each query of rank among the keys.
func (p *Planner) rows(rank int) []int {
	if !p.spec.Positions {
		return nil
	}
	s, rows := &p.shape, []int{}
	for _, at := range partition.Positions(s.Layout.Spans(s.SeqQ, s.Size, rank)) {
		rows = append(rows, s.Aligned(at))
	}
	return rows
}

func (p *Planner) hopLabel(h, owner int) string {
	var b [48]byte
	label, of := strconv.AppendInt(append(b[:0], "hop "...), int64(h), 10), " owner "
	if p.degree > 1 {
		of = " group "
	}
	return string(strconv.AppendInt(append(label, of...), int64(owner), 10))
}

func move(peer, buf int, r partition.Range) Move { return Move{peer, Block{buf, r.Lo, r.Hi}} }

// finish completes a schedule: it sizes the buffers and drops hops in which the rank has nothing to do. Without Forward
// the forward pass is the backward pass without gradients.
func (p *Planner) finish(s *Schedule) *Schedule {
	own := Buffer{Rows: p.index.Keys(s.Rank)}
	if p.spec.Split && p.groupHeads() == 0 {
		if s.Forward == nil {
			s.Forward = s.Backward
		}
		s.Backward = split(s.Backward)
	}
	s.Rows, s.GatherHeads = p.rows(s.Rank), p.groupHeads()
	s.KVBufs, s.GradBufs = []Buffer{own}, []Buffer{own}
	s.size()
	passes := []*[]Hop{&s.Backward}
	if s.Forward != nil {
		passes = append(passes, &s.Forward)
	}
	kv, grads := len(s.KVBufs), len(s.GradBufs)
	for _, hops := range passes {
		if s.GatherHeads > 0 {
			*hops = p.grouped(*hops, kv, grads, own.Rows)
		} else {
			(*hops)[0].Begins = true
		}
		*hops = slices.DeleteFunc(*hops, func(h Hop) bool { return h.empty() && !h.Begins })
		markEnds(*hops)
	}
	if s.GatherHeads > 0 {
		s.KVBufs, s.GradBufs = p.groupBuffers(s.KVBufs, 0, 2), p.groupBuffers(s.GradBufs, 1, 1)
	}
	if s.Forward == nil {
		s.Forward = s.Backward
	}
	s.Forward = forwardOf(s.Forward)
	markEnds(s.Forward)
	return s
}

func (s *Schedule) size() {
	hold := func(list *[]Buffer) func(*Block) {
		return func(b *Block) {
			for b.Buf >= len(*list) {
				*list = append(*list, Buffer{})
			}
			x := &(*list)[b.Buf]
			x.Rows = max(x.Rows, b.Hi)
		}
	}
	kv, grad := hold(&s.KVBufs), hold(&s.GradBufs)
	for i := range s.Forward {
		s.Forward[i].blocks(kv, func(*Block) {})
	}
	for i := range s.Backward {
		s.Backward[i].blocks(kv, grad)
	}
}

// markEnds marks the ends of passes, and the first and the last call of each.
func markEnds(hops []Hop) {
	begun, last := false, -1
	for i := range hops {
		h := &hops[i]
		if h.Begins {
			begun, last = true, -1
		}
		if len(h.Tiles) > 0 {
			h.First, last = last < 0, i
		}
		if h.Ends = begun && (i+1 == len(hops) || hops[i+1].Begins); h.Ends && last >= 0 {
			hops[last].Last = true
		}
	}
}

// forwardOf returns the hops of a backward pass without gradients, and without hops that are then empty.
func forwardOf(hops []Hop) []Hop {
	out := make([]Hop, 0, len(hops))
	for _, f := range hops {
		if f.Begins || f.forward() {
			f.Grads, f.SendGrad, f.RecvGrad, f.CopyGrad, f.Fold = Block{}, nil, nil, nil, nil
			out = append(out, f)
		}
	}
	return out
}

// A Strategy says how attention runs over the ranks that share a sequence. A run has one for all its layers.
// Strategies are comparable.
type Strategy struct {
	Layout partition.LayoutName `json:"layout"` // which rank has which positions

	Algorithm   string `json:"algorithm"`              // of Algorithms
	Inner       int    `json:"inner,omitempty"`        // of hierarchical: neighbouring ranks that exchange heads
	GatherHeads int    `json:"gather_heads,omitempty"` // of allgather: key-value heads at a time; 0: all
	Gather      string `json:"gather,omitempty"`       // of Gathers: when rows travel that come in one hop; "": Beside
	Backend     string `json:"backend"`                // of package internal/model/backends
}

func (s Strategy) String() string {
	text := s.Algorithm
	switch {
	case s.Inner > 0:
		text += fmt.Sprintf(" (inner %d)", s.Inner)
	case s.GatherHeads > 0:
		text += fmt.Sprintf(" (gather_heads %d)", s.GatherHeads)
	}
	if s.Algorithm == "allgather" {
		text += map[string]string{Before: " (before)", Auto: " (before, forward)"}[s.Gather]
	}
	return text + ", " + string(s.Layout) + ", " + s.Backend
}

// When returns Gather, or Beside if it is empty.
func (s Strategy) When() string { return cmp.Or(s.Gather, Beside) }

// Spec returns the input of the schedules of an attention by s.
func (s Strategy) Spec(shape partition.Shape, heads, kvHeads int) Spec {
	return Spec{
		Shape: shape, Heads: heads, KVHeads: kvHeads,
		Inner: s.Inner, GatherHeads: s.GatherHeads, Gather: s.Gather,
		Split: s.Backend != "fused", // cuDNN would compute the hidden pairs of the second half
	}
}

// UlyssesDegree returns how many ranks exchange heads with each other by s, if that many share a sequence.
func (s Strategy) UlyssesDegree(ranks int) int { return UlyssesDegree(s.Algorithm, ranks, s.Inner) }
