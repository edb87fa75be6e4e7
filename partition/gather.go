package partition

import (
	"cmp"
	"slices"
	"sort"
	"sync"
)

// Run is rows of the keys that a rank owns, neighbours in its block and in the sequence.
type Run struct {
	Owner int
	Rows  Range
	Start int // the position of the first row
	At    int // the place of the first row among the gathered rows
}

// Gathered is all keys that queries of a rank see, its own and others', side by side in the order of the
// sequence. What a query sees is in one piece there, whoever owns it.
type Gathered struct {
	Runs  []Run // without gaps
	Rows  int
	Tiles []Tile // of the rank's queries and the gathered rows, trimmed and joined
}

// Runs returns the rows of owner's keys that queries of rank see, in the order of the sequence, without a place: At is
// 0. It appends to buf, an empty slice, and allocates only beyond its capacity.
func (x *Index) Runs(buf []Run, rank, owner int) []Run {
	runs := x.addRuns(buf, rank, owner)
	if !slices.IsSortedFunc(runs, byStart) {
		slices.SortFunc(runs, byStart)
	}
	return runs
}

func byStart(a, b Run) int { return a.Start - b.Start }

// addRuns appends the runs of an owner, in the order of its rows.
func (x *Index) addRuns(runs []Run, rank, owner int) []Run {
	if x.apart(rank, owner) {
		return runs
	}
	var buf [8]Range
	needs, at := needRanges(buf[:0], x.bands, &x.q[rank], &x.k[owner]), 0
	for _, s := range x.spans[owner] {
		for len(needs) > 0 && needs[0].Hi <= at {
			needs = needs[1:]
		}
		if len(needs) == 0 {
			break
		}
		for i := 0; i < len(needs) && needs[i].Lo < at+s.Len; i++ {
			lo, hi := max(needs[i].Lo, at), min(needs[i].Hi, at+s.Len)
			runs = append(runs, Run{Owner: owner, Rows: Range{lo, hi}, Start: s.Start + (lo-at)*s.Stride})
		}
		at += s.Len
	}
	return runs
}

// runsOf appends the runs of all owners, in the order of these and of their rows.
func (x *Index) runsOf(runs []Run, rank int) []Run {
	if list, ok := x.Owners(rank); ok {
		for _, n := range list {
			runs = x.addRuns(runs, rank, n.Peer)
		}
		return runs
	}
	for owner := range x.k {
		runs = x.addRuns(runs, rank, owner)
	}
	return runs
}

// A gathering is scratch memory of Gather.
type gathering struct {
	runs  []Run
	order []int
	keys  []piece
}

var gatherings = sync.Pool{New: func() any { return &gathering{} }}

// Gather returns the rows that queries of rank see, and no others.
func (x *Index) Gather(rank int) Gathered {
	s := gatherings.Get().(*gathering)
	defer gatherings.Put(s)
	s.runs, s.order = x.runsOf(s.runs[:0], rank), s.order[:0]
	runs := s.runs
	for i := range runs {
		s.order = append(s.order, i)
	}
	slices.SortStableFunc(s.order, func(a, b int) int { return byStart(runs[a], runs[b]) })
	g := Gathered{Runs: make([]Run, 0, len(runs))}
	for _, i := range s.order {
		runs[i].At = g.Rows
		g.Rows += runs[i].Rows.Len()
		g.Runs = append(g.Runs, runs[i])
	}
	keys := pieces{rows: g.Rows, list: s.keys[:0]}
	for len(runs) > 0 {
		n, owner := 1, runs[0].Owner
		for n < len(runs) && runs[n].Owner == owner {
			n++
		}
		for i := range x.k[owner].list {
			keys.list = x.k[owner].list[i].placed(keys.list, runs[:n])
		}
		runs = runs[n:]
	}
	s.keys = keys.list
	keys.join()
	g.Tiles = tilesOf(x.bands, &x.q[rank], &keys)
	return g
}

// placed appends the parts of p that runs have, at their gathered places. Runs are of one owner, in the order
// of its rows.
func (p *piece) placed(to []piece, runs []Run) []piece {
	i := sort.Search(len(runs), func(i int) bool { return runs[i].Rows.Hi > p.at })
	for ; i < len(runs) && runs[i].Rows.Lo < p.at+p.Len; i++ {
		r := &runs[i]
		lo, hi := max(p.at, r.Rows.Lo), min(p.at+p.Len, r.Rows.Hi)
		part := Span{Start: p.Start + (lo-p.at)*p.Stride, Len: hi - lo, Stride: p.Stride}
		to = append(to, piece{Span: part, at: r.At + lo - r.Rows.Lo, doc: p.doc})
	}
	return to
}

// join puts pieces in order, and joins pieces that owners had parted.
func (p *pieces) join() {
	slices.SortFunc(p.list, func(a, b piece) int { return cmp.Or(a.doc-b.doc, a.at-b.at) })
	out := p.list[:0]
	for _, next := range p.list {
		if n := len(out); n > 0 && out[n-1].continues(next) {
			out[n-1].Len += next.Len
			continue
		}
		out = append(out, next)
	}
	p.list, p.ascend = out, rises(out)
}

// continues reports whether b comes next, in the sequence and in memory.
func (p *piece) continues(b piece) bool {
	return p.doc == b.doc && p.Stride == 1 && b.Stride == 1 && p.end() == b.Start && p.at+p.Len == b.at
}

// Halo reports whether a mask hides keys on both sides of a query, so that the rows that a rank needs do not grow with
// the sequence, and every rank needs at most two blocks of the others' keys. Then it can fetch
// them at once in no more memory than the two blocks that a ring keeps. It sends no more either, since in a
// ring rows pass through ranks that do not need them. The answer is one for all ranks, and each finds
// it: it asks every pair of ranks, up to the first rank that needs more.
func (x *Index) Halo() bool {
	if !x.windowed {
		return false
	}
	block := 0
	for r := range x.k {
		block = max(block, x.Keys(r))
	}
	for rank := range x.q {
		if x.othersOf(rank, 2*block) > 2*block {
			return false
		}
	}
	return true
}

// othersOf returns how many rows rank needs of others, or any number above most.
func (x *Index) othersOf(rank, most int) (rows int) {
	if list, ok := x.Owners(rank); ok {
		for _, n := range list {
			if n.Peer != rank {
				rows += n.Rows.Len()
			}
		}
		return rows
	}
	for owner := range x.k {
		if owner != rank {
			rows += x.Needs(rank, owner).Len()
		}
		if rows > most {
			break
		}
	}
	return rows
}
