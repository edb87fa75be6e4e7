package ring

import (
	"fmt"

	"github.com/cprun/cprun/partition"
)

// Block is rows [Lo, Hi) of a buffer of keys and values, or of their gradients. Buffer 0
// is the rank's own block; the others are workspace.
type Block struct{ Buf, Lo, Hi int }

// Move is a block to or from a peer.
type Move struct {
	Peer  int
	Block Block
}

// Fold adds Src to Dst, both blocks of gradients.
type Fold struct{ Dst, Src Block }

// Hop is one turn of the loop: transfers begin, a kernel call runs beside them, and both
// have ended before the next hop begins. The gradient fields are used by Backward alone.
type Hop struct {
	Label string
	Keys  Block            // the rows that Tiles index, as a whole block of Buf
	Tiles []partition.Tile // none: no kernel call

	SendKV, RecvKV []Move // keys and values for later hops

	Grads              Block // where the call's dK, dV go; zeroed first unless it is the own block
	SendGrad, RecvGrad []Move
	Fold               []Fold // in order, when the call and the transfers have ended
}

func (h *Hop) empty() bool {
	return len(h.Tiles)+len(h.SendKV)+len(h.RecvKV)+len(h.SendGrad)+len(h.RecvGrad)+len(h.Fold) == 0
}

// foldsFirst says that the gradients of the call are added to before anything else happens to them.
func (h *Hop) foldsFirst() bool { return len(h.Fold) > 0 && h.Fold[0].Dst.Buf == h.Grads.Buf }

// Schedule is one rank's part of one attention over all ranks, as data: what the loops in
// ring.go do, hop by hop. It is a pure function of the partition, so that ranks agree on it
// without a word between them.
type Schedule struct {
	Algorithm string
	Rank      int
	Forward   []Hop
	Backward  []Hop
	KVRows    []int // rows of each K/V buffer; KVRows[0] is the own block
	GradRows  []int // rows of each dK/dV buffer, likewise
}

// Algorithms are the exchange patterns that New knows.
var Algorithms = []string{"ring", "allgather"}

// New is the schedule of rank under that algorithm.
func New(algorithm string, s partition.Shape, rank int) (*Schedule, error) {
	return newPlans(s).schedule(algorithm, rank)
}

// All is the schedules of every rank. Each follows from the tiles of all ranks, so that
// making them one by one would take a rank's time for each of the others.
func All(algorithm string, s partition.Shape) ([]*Schedule, error) {
	p := newPlans(s)
	all := make([]*Schedule, s.Size)
	for r := range all {
		var err error
		if all[r], err = p.schedule(algorithm, r); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (p *plans) schedule(algorithm string, rank int) (*Schedule, error) {
	switch algorithm {
	case "ring":
		return p.ring(rank), nil
	case "allgather":
		return p.allgather(rank), nil
	}
	return nil, fmt.Errorf("algorithm %q is none of %v", algorithm, Algorithms)
}

// plans is the tiles of every rank against every owner's keys: what each rank must know
// about the others to send them what they need and nothing else.
type plans struct {
	size  int
	rows  []int                // local keys of each owner
	tiles [][][]partition.Tile // [rank][owner]
}

func newPlans(s partition.Shape) *plans {
	p := &plans{size: s.Size, rows: make([]int, s.Size), tiles: make([][][]partition.Tile, s.Size)}
	for r := range s.Size {
		p.rows[r] = partition.Count(s.Layout.Spans(s.SeqKV, s.Size, r))
		p.tiles[r] = make([][]partition.Tile, s.Size)
		for o := range s.Size {
			p.tiles[r][o] = partition.Plan(s, r, o)
		}
	}
	return p
}

// need is the rows of owner's block that rank's tiles read.
func (p *plans) need(rank, owner int) partition.Range {
	var u partition.Range
	for _, t := range p.tiles[rank][owner] {
		u = union(u, t.K)
	}
	return u
}

func union(a, b partition.Range) partition.Range {
	if a.Len() == 0 {
		return b
	}
	if b.Len() == 0 {
		return a
	}
	return partition.Range{Lo: min(a.Lo, b.Lo), Hi: max(a.Hi, b.Hi)}
}

// own is hop 0 of every algorithm: the rank's queries against its own keys.
func (p *plans) own(rank int) Hop {
	whole := Block{0, 0, p.rows[rank]}
	return Hop{Label: fmt.Sprintf("hop 0 owner %d", rank), Keys: whole, Grads: whole, Tiles: p.tiles[rank][rank]}
}

func move(peer, buf int, r partition.Range) Move { return Move{peer, Block{buf, r.Lo, r.Hi}} }

// used is the rows of every buffer up to the highest that a block names: buffer 0 has own
// rows, workspace what its blocks reach.
func used(own int, hops []Hop, blocks func(*Hop) []Block) []int {
	rows := []int{own}
	for i := range hops {
		for _, b := range blocks(&hops[i]) {
			for b.Buf >= len(rows) {
				rows = append(rows, 0)
			}
			rows[b.Buf] = max(rows[b.Buf], b.Hi)
		}
	}
	return rows
}

// finish drops the hops in which a rank has nothing to do and sizes the workspace.
func (p *plans) finish(s *Schedule) *Schedule {
	s.Forward, s.Backward = compact(s.Forward), compact(s.Backward)
	own := p.rows[s.Rank]
	s.KVRows = used(own, s.Backward, func(h *Hop) []Block {
		b := []Block{h.Keys}
		for _, m := range append(h.SendKV[:len(h.SendKV):len(h.SendKV)], h.RecvKV...) {
			b = append(b, m.Block)
		}
		return b
	})
	s.GradRows = used(own, s.Backward, func(h *Hop) []Block {
		b := []Block{h.Grads}
		for _, m := range append(h.SendGrad[:len(h.SendGrad):len(h.SendGrad)], h.RecvGrad...) {
			b = append(b, m.Block)
		}
		return b
	})
	return s
}

func compact(hops []Hop) []Hop {
	out := hops[:0:0]
	for i := range hops {
		if !hops[i].empty() {
			out = append(out, hops[i])
		}
	}
	return out
}

// forwardOf is the hops of a backward schedule without what only gradients need.
func forwardOf(hops []Hop) []Hop {
	out := make([]Hop, 0, len(hops))
	for _, h := range hops {
		out = append(out, Hop{Label: h.Label, Keys: h.Keys, Tiles: h.Tiles, SendKV: h.SendKV, RecvKV: h.RecvKV})
	}
	return out
}

// Bytes is what the rank sends in one forward and one backward pass, given the bytes of one
// row of K and V, and of one row of dK and dV.
func (s *Schedule) Bytes(kvRow, gradRow int64) (forward, backward int64) {
	for i := range s.Backward {
		h := &s.Backward[i]
		for _, m := range h.SendKV {
			forward += int64(m.Block.Hi-m.Block.Lo) * kvRow
		}
		for _, m := range h.SendGrad {
			backward += int64(m.Block.Hi-m.Block.Lo) * gradRow
		}
	}
	return forward, backward + forward
}
