package scan

import (
	"slices"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Slot is room for one map or one state, of every sample of the batch. The first state slots are the results of the
// pass, in the order of Pass.States, and the first map slots its inputs, of Pass.Maps. The rest is workspace.
type Slot struct {
	State bool // not a map
	At    int
}

// Move is a slot to or from a peer.
type Move struct {
	Peer int
	Slot Slot
}

// Result sets a state slot to R of a map slot: the state after the first segment of a document.
type Result struct{ State, Map int }

// Compose sets Dst to Later after Earlier. Earlier and Dst are both maps or both states.
type Compose struct{ Dst, Later, Earlier Slot }

// Round is one turn of the loop: transfers, and then compositions.
type Round struct {
	Send, Recv []Move
	Compose    []Compose // in order: some read a slot that a later one sets
}

// Pass is one rank's part of the exchange of states in one direction. The first segment of a document is the first in
// that direction: in the backward pass, the last of the sequence. Its state is 0, and has no slot.
type Pass struct {
	States     []int    // places of the segments to set states of: all after another one
	Maps       []int    // places of the segments to compute maps of: all that another one follows
	StateSlots int      // of States and workspace
	MapSlots   int      // of Maps and workspace
	Results    []Result // before round 0
	Rounds     []Round
}

// States is one rank's part of the exchange of states, as data.
type States struct {
	Forward  Pass // of the states before segments
	Backward Pass // of the gradients of the states after them
}

// NewStates returns the schedule of rank, a pure function of the segments: an exclusive prefix scan over those of each
// document (Hillis and Steele, Data Parallel Algorithms, CACM 1986). The window of a segment is the map of some
// segments just before it. In round 0 each segment sends its own map to the next one, as its window. In later rounds it
// sends its window to the segment at distance 1, 2, 4, ..., which composes the two, so that windows double. A window
// from the first segment of the document is a state. All documents share the rounds. A document of one segment takes no
// part.
func NewStates(x *partition.Segments, rank int) *States {
	return &States{Forward: newPass(x, rank, false), Backward: newPass(x, rank, true)}
}

func newPass(x *partition.Segments, rank int, backward bool) Pass {
	own := len(x.Own[rank])
	p := &planner{rank: rank, slots: make([]int, own), states: make([]int, own)}
	var chains [][]partition.Segment
	longest := 0
	for _, doc := range x.Docs {
		chain := x.All[doc.Lo:doc.Hi]
		if !slices.ContainsFunc(chain, func(s partition.Segment) bool { return s.Rank == rank }) {
			continue
		}
		if backward {
			chain = slices.Clone(chain)
			slices.Reverse(chain)
		}
		chains, longest = append(chains, chain), max(longest, len(chain))
	}
	for place, i := range x.Own[rank] {
		doc := x.Docs[x.All[i].Doc]
		first, last := i == doc.Lo, i == doc.Hi-1
		if backward {
			first, last = last, first
		}
		if !first {
			p.states[place] = len(p.States)
			p.States = append(p.States, place)
		}
		if !last {
			p.slots[place] = len(p.Maps)
			p.Maps = append(p.Maps, place)
		}
	}
	p.StateSlots, p.MapSlots = len(p.States), len(p.Maps)
	if longest > 1 {
		p.round(chains, p.shift)
	}
	for distance := 1; distance < longest-1; distance *= 2 {
		p.round(chains, func(chain []partition.Segment) { p.double(chain, distance) })
	}
	return p.Pass
}

// A planner plans a pass.
type planner struct {
	Pass
	rank        int
	states      []int // of each own segment: its state; of the first of a document, the state after it
	slots       []int // of each own segment: its own map, then its window
	free, freed []int // map slots that receive again, from this round or from the next one on
}

func (p *planner) has(s *partition.Segment) bool { return s.Rank == p.rank }

func (p *planner) round(chains [][]partition.Segment, plan func([]partition.Segment)) {
	p.Rounds = append(p.Rounds, Round{})
	for _, chain := range chains {
		plan(chain)
	}
	p.free, p.freed = append(p.free, p.freed...), p.freed[:0]
}

// shift plans round 0. Like double it begins at the end of the chain, so that slots are read before they are set.
func (p *planner) shift(chain []partition.Segment) {
	for i := len(chain) - 2; i >= 0; i-- {
		from, to := &chain[i], &chain[i+1]
		if i == 0 && p.has(from) {
			at := p.StateSlots
			if p.has(to) {
				at = p.states[to.Place]
			} else {
				p.StateSlots++
			}
			p.states[from.Place] = at
			p.Results = append(p.Results, Result{State: at, Map: p.slots[from.Place]})
		}
		came := p.hand(from, to, i == 0)
		if p.has(to) {
			p.slots[to.Place] = came.At // unused if it is a state
		}
		if p.has(from) && !p.has(to) {
			p.freed = append(p.freed, p.slots[from.Place])
		}
	}
}

// double plans a later round, before which windows are distance segments long.
func (p *planner) double(chain []partition.Segment, distance int) {
	for i := len(chain) - 1 - distance; i > 0; i-- {
		from, to, state := &chain[i], &chain[i+distance], i <= distance
		came := p.hand(from, to, state)
		if !p.has(to) {
			continue
		}
		window := Slot{At: p.slots[to.Place]}
		c := Compose{Dst: window, Later: window, Earlier: came}
		if state {
			c.Dst = Slot{State: true, At: p.states[to.Place]}
		} else if !p.has(from) {
			p.freed = append(p.freed, came.At)
		}
		last := &p.Rounds[len(p.Rounds)-1]
		last.Compose = append(last.Compose, c)
	}
}

// hand plans the transfer of a window, or of a state, between two segments. It returns the slot of it on the receiver's
// rank: the sender's own on the same rank.
func (p *planner) hand(from, to *partition.Segment, state bool) (came Slot) {
	last := &p.Rounds[len(p.Rounds)-1]
	if p.has(from) {
		came = Slot{At: p.slots[from.Place]}
		if state {
			came = Slot{State: true, At: p.states[from.Place]}
		}
		if !p.has(to) {
			last.Send = append(last.Send, Move{to.Rank, came})
		}
	} else if p.has(to) {
		came = Slot{State: true, At: p.states[to.Place]}
		if !state {
			came = Slot{At: p.take()}
		}
		last.Recv = append(last.Recv, Move{from.Rank, came})
	}
	return came
}

// take returns a free map slot.
func (p *planner) take() int {
	if n := len(p.free) - 1; n >= 0 {
		slot := p.free[n]
		p.free = p.free[:n]
		return slot
	}
	p.MapSlots++
	return p.MapSlots - 1
}

// Halo is one rank's part of the exchange of the rows before its segments, as data. Block.Buf 0 is the rank's own rows,
// and 1+n the rows before its segment n. The backward pass runs it in reverse.
type Halo struct {
	Rows       int // before each segment
	Send, Recv []ring.Move
	Copy       []ring.Copy  // on the rank
	Zero       []ring.Block // before the begin of a document
}

// NewHalo returns the schedule of rank for a causal convolution that reads that many rows before each row, in its
// document. Several segments may hold them.
func NewHalo(x *partition.Segments, rank, rows int) *Halo {
	h := &Halo{Rows: rows}
	for _, doc := range x.Docs {
		for i := doc.Lo; i < doc.Hi; i++ {
			h.before(x.All[doc.Lo:i+1], rank)
		}
	}
	return h
}

// before plans the rows before the last segment of a chain.
func (h *Halo) before(chain []partition.Segment, rank int) {
	last := len(chain) - 1
	to, missing := &chain[last], h.Rows
	for i := last - 1; i >= 0 && missing > 0; i-- {
		from := &chain[i]
		n := min(missing, from.Rows.Len())
		src := ring.Block{Lo: from.Rows.Hi - n, Hi: from.Rows.Hi}
		dst := ring.Block{Buf: 1 + to.Place, Lo: missing - n, Hi: missing}
		missing -= n
		switch {
		case from.Rank == rank && to.Rank == rank:
			h.Copy = append(h.Copy, ring.Copy{Dst: dst, Src: src})
		case from.Rank == rank:
			h.Send = append(h.Send, ring.Move{Peer: to.Rank, Block: src})
		case to.Rank == rank:
			h.Recv = append(h.Recv, ring.Move{Peer: from.Rank, Block: dst})
		}
	}
	if to.Rank == rank && missing > 0 {
		h.Zero = append(h.Zero, ring.Block{Buf: 1 + to.Place, Hi: missing})
	}
}
