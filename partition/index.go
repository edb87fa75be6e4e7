package partition

import (
	"slices"
	"sort"
	"sync"
)

// Index returns the tiles and needed keys of pairs of ranks of one Shape. It cuts the spans of every rank
// at the documents or slices once. The cost of a pair then grows with the documents common to both ranks,
// never with the positions. An Index is read-only once made: goroutines may share it.
type Index struct {
	bands    bands
	windowed bool     // keys are hidden on both sides of a query
	spans    [][]Span // of the keys of each rank
	q, k     []pieces // of each rank
	byK      cuts
	seqQ     int
	seqKV    int
	held     [][]held // of keys: the ranks with part of each document; nil: not computed yet
	all      *pairs   // nil: not prepared
}

// NewIndex returns the index of s.
func NewIndex(s Shape) *Index {
	byQ, byK := s.Mask.cuts()
	x := &Index{bands: s.Mask.bands(), spans: AllSpans(s.Layout, s.SeqQ, s.Size), byK: byK, seqQ: s.SeqQ,
		seqKV: s.SeqKV}
	x.windowed = s.Mask.windowed(s.SeqQ, s.SeqKV)
	x.q = cutAll(x.spans, byQ)
	x.k = x.q
	if s.SeqKV != s.SeqQ || len(s.Mask.Slices) > 0 {
		x.spans = AllSpans(s.Layout, s.SeqKV, s.Size)
		x.k = cutAll(x.spans, byK)
	}
	return x
}

// Tiles returns the tiles between rank's queries and owner's keys, in local indices of the two,
// trimmed and joined; nil when nothing is visible.
func (x *Index) Tiles(rank, owner int) []Tile {
	if x.apart(rank, owner) {
		return nil
	}
	return tilesOf(x.bands, &x.q[rank], &x.k[owner])
}

// apart reports whether the prepared pairs show that rank sees no key of owner.
func (x *Index) apart(rank, owner int) bool { return x.all != nil && x.Needs(rank, owner).Len() == 0 }

// Needs returns the smallest range of owner's keys with every key visible to a query of rank. It equals
// the hull of the K of Tiles, without computing tiles. It is empty when nothing is visible.
func (x *Index) Needs(rank, owner int) Range {
	if x.all != nil {
		list := x.all.of[rank]
		i, ok := slices.BinarySearchFunc(list, owner, func(n Need, owner int) int { return n.Peer - owner })
		if !ok {
			return Range{}
		}
		return list[i].Rows
	}
	return needs(x.bands, &x.q[rank], &x.k[owner])
}

// NeedRanges returns exactly the rows of owner's keys visible to queries of rank: the fewest ranges, in
// order, with a gap between any two. They equal the K of Tiles, without computing tiles. There are none
// when nothing is visible. It appends to buf, an empty slice, and allocates only beyond its capacity.
func (x *Index) NeedRanges(buf []Range, rank, owner int) []Range {
	if x.apart(rank, owner) {
		return buf
	}
	return needRanges(buf, x.bands, &x.q[rank], &x.k[owner])
}

// Keys returns the number of owner's keys.
func (x *Index) Keys(owner int) int { return x.k[owner].rows }

// A piece is the part of a span inside one document, or inside one slice of a mask.
type piece struct {
	Span
	at  int // the local index of its first position
	doc int // index of its document, or of its slice, treated like a document
}

// pieces lists a rank's positions, document by document; inside a document, in storage order. A position
// of several slices appears once for each.
type pieces struct {
	list []piece
	rows int
	// ascend means that local indices rise from document to document. The first visible key is then
	// in the first document with any.
	ascend bool
}

func cutAll(spans [][]Span, c cuts) []pieces {
	all, n := make([]pieces, len(spans)), len(c.ends)
	for r := range spans {
		n += len(spans[r])
	}
	buf := make([]piece, 0, n) // an end cuts at most one of several contiguous spans
	for r := range spans {
		all[r] = c.cut(spans[r], buf)
		list := &all[r].list
		n := len(*list)
		buf, *list = (*list)[n:], (*list)[:n:n]
	}
	return all
}

// add appends the pieces of a span. If few positions lie in many documents, it searches once for each
// position; if many lie in few, it takes one step for each document.
func (p *pieces) add(s Span, ends []int) {
	at := p.rows
	p.rows += s.Len
	if len(ends) == 0 {
		p.list = append(p.list, piece{Span: s, at: at})
		return
	}
	doc := 0
	for s.Len > 0 {
		if doc++; doc >= len(ends) || ends[doc] <= s.Start || ends[doc-1] > s.Start {
			doc = sort.SearchInts(ends, s.Start+1)
		}
		if doc == len(ends) {
			return // positions after the last document see nothing
		}
		part := s
		part.Len = min(s.Len, ceilDiv(ends[doc]-s.Start, s.Stride))
		p.list = append(p.list, piece{Span: part, at: at, doc: doc})
		at += part.Len
		s.Len -= part.Len
		s.Start += part.Len * s.Stride
	}
}

// meet returns the first pieces of a common document, starting at i and j; ok is false if none is common.
func meet(q, k []piece, i, j int) (_, _ int, ok bool) {
	for i < len(q) && j < len(k) {
		switch a, b := q[i].doc, k[j].doc; {
		case a == b:
			return i, j, true
		case a < b:
			i = seek(q, i, b)
		default:
			j = seek(k, j, a)
		}
	}
	return i, j, false
}

// seek returns the first piece after i of that document or a later one. It doubles its steps, since
// the piece is mostly near.
func seek(p []piece, i, doc int) int {
	step := 1
	for i+step < len(p) && p[i+step].doc < doc {
		i += step
		step *= 2
	}
	n := min(step, len(p)-1-i)
	return i + 1 + sort.Search(n, func(d int) bool { return p[i+1+d].doc >= doc })
}

// run returns the index one past the last piece of piece i's document.
func run(p []piece, i int) int {
	n := i + 1
	for n < len(p) && p[n].doc == p[i].doc {
		n++
	}
	return n
}

// sees reports whether a query of a sees a key of b, both in one document. It ignores strides: of
// strided pieces it may return true although no key is visible.
func sees(band Band, a, b *piece) bool {
	return band.meets(Range{a.Start, a.end()}, Range{b.Start, b.end()})
}

// meets reports whether the band makes a key of range k visible to a query of range q.
func (b Band) meets(q, k Range) bool { return k.Hi-1-q.Lo >= b.Lo && k.Lo-(q.Hi-1) <= b.Hi }

// tile returns the pairs of a piece of queries and a piece of keys of the same document; ok is false if none are
// visible.
func tile(band Band, a, b *piece) (t Tile, ok bool) {
	if !sees(band, a, b) {
		return t, false
	}
	return Tile{
		Q:    Range{a.at, a.at + a.Len},
		K:    Range{b.at, b.at + b.Len},
		Band: localBand(band, a.Span, b.Span).shift(b.at - a.at),
	}.Trim()
}

// scratch pools memory for tiles before joinAll.
var scratch = sync.Pool{New: func() any { return new([]weighed) }}

func tilesOf(bands bands, q, k *pieces) []Tile {
	s := scratch.Get().(*[]weighed)
	defer scratch.Put(s)
	tiles := (*s)[:0]
	for i, j, ok := meet(q.list, k.list, 0, 0); ok; i, j, ok = meet(q.list, k.list, i, j) {
		iEnd, jEnd, band := run(q.list, i), run(k.list, j), bands.of(q.list[i].doc)
		for ; i < iEnd; i++ {
			for b := j; b < jEnd; b++ {
				if t, ok := tile(band, &q.list[i], &k.list[b]); ok {
					tiles = append(tiles, weighed{Tile: t})
				}
			}
		}
		j = jEnd
	}
	*s = tiles
	return joinAll(tiles)
}

func needs(bands bands, q, k *pieces) Range {
	var u Range
	for i, j, ok := meet(q.list, k.list, 0, 0); ok; i, j, ok = meet(q.list, k.list, i, j) {
		iEnd, jEnd := run(q.list, i), run(k.list, j)
		u = u.Hull(within(bands.of(q.list[i].doc), q.list[i:iEnd], k.list[j:jEnd]))
		i, j = iEnd, jEnd
		if u.Len() > 0 && k.ascend {
			return u.Hull(lastNeeds(bands, q.list[i:], k.list[j:]))
		}
	}
	return u
}

// needRanges returns the union of the key ranges; within returns their hull. In each piece, a query sees
// keys without a gap, and the next query sees the adjacent ones. It appends to all, and reallocates only
// beyond its capacity.
func needRanges(all []Range, bands bands, q, k *pieces) []Range {
	for i, j, ok := meet(q.list, k.list, 0, 0); ok; i, j, ok = meet(q.list, k.list, i, j) {
		iEnd, jEnd, band := run(q.list, i), run(k.list, j), bands.of(q.list[i].doc)
		for b := j; b < jEnd; b++ {
			for a := i; a < iEnd; a++ {
				if u := within(band, q.list[a:a+1], k.list[b:b+1]); u.Len() > 0 {
					all = append(all, u)
				}
			}
		}
		i, j = iEnd, jEnd
	}
	return union(all)
}

// union sorts ranges and joins those in contact, in place.
func union(r []Range) []Range {
	slices.SortFunc(r, func(a, b Range) int { return a.Lo - b.Lo })
	out := r[:0]
	for _, x := range r {
		if n := len(out); n > 0 && x.Lo <= out[n-1].Hi {
			out[n-1].Hi = max(out[n-1].Hi, x.Hi)
			continue
		}
		out = append(out, x)
	}
	return out
}

// lastNeeds returns the hull of the visible keys of the last document with any.
func lastNeeds(bands bands, q, k []piece) Range {
	for len(q) > 0 && len(k) > 0 {
		i, j := len(q)-1, len(k)-1
		switch a, b := q[i].doc, k[j].doc; {
		case a > b:
			q = q[:i]
		case a < b:
			k = k[:j]
		default:
			for i > 0 && q[i-1].doc == a {
				i--
			}
			for j > 0 && k[j-1].doc == a {
				j--
			}
			if u := within(bands.of(a), q[i:], k[j:]); u.Len() > 0 {
				return u
			}
			q, k = q[:i], k[:j]
		}
	}
	return Range{}
}

// within returns the hull of the keys visible to queries of one document: the hull of the K of the
// trimmed tiles. Local indices rise from piece to piece, so the hull reaches from the first piece with a
// visible key to the last.
func within(band Band, q, k []piece) (u Range) {
	for len(k) > 0 && u.Len() == 0 {
		u, k = shown(band, q, &k[0]), k[1:]
	}
	for j := len(k) - 1; j >= 0; j-- {
		if last := shown(band, q, &k[j]); last.Len() > 0 {
			return u.Hull(last)
		}
	}
	return u
}

// shown returns the keys of one piece visible to queries of its document. The last query mostly sees all.
func shown(band Band, q []piece, b *piece) (u Range) {
	for i := len(q) - 1; i >= 0 && u.Len() < b.Len; i-- {
		a := &q[i]
		l := band.shift(a.Start - b.Start)
		if a.Stride != 1 || b.Stride != 1 {
			if !sees(band, a, b) {
				continue
			}
			l = localBand(band, a.Span, b.Span)
		}
		if lo, hi := max(0, l.Lo), min(b.Len, a.Len+l.Hi); lo < hi && l.Lo <= l.Hi {
			u = u.Hull(Range{b.at + lo, b.at + hi})
		}
	}
	return u
}

// A cuts value lists where positions, of queries or of keys, are cut: at the ends of documents, or at the bounds
// of slices; neither: nowhere.
type cuts struct {
	ends   []int   // one past the last position of each document
	ranges []Range // of each slice
}

func (m *Mask) cuts() (q, k cuts) {
	for _, t := range m.Slices {
		q.ranges, k.ranges = append(q.ranges, t.Q), append(k.ranges, t.K)
	}
	if len(m.Slices) > 0 || len(m.Docs) == 0 {
		return q, k
	}
	ends, n := make([]int, len(m.Docs)), 0
	for i, d := range m.Docs {
		n += d
		ends[i] = n
	}
	return cuts{ends: ends}, cuts{ends: ends}
}

// bounds returns the positions of a document or slice, in a sequence of n.
func (c cuts) bounds(doc, n int) (lo, hi int) {
	switch {
	case len(c.ranges) > 0:
		return c.ranges[doc].Lo, c.ranges[doc].Hi
	case len(c.ends) == 0:
		return 0, n
	case doc > 0:
		lo = c.ends[doc-1]
	}
	return min(lo, n), min(c.ends[doc], n)
}

// cut cuts spans into pieces, in memory that may be nil. Without documents a span is one piece.
func (c cuts) cut(spans []Span, buf []piece) pieces {
	if len(c.ranges) > 0 {
		return cutSlices(spans, c.ranges)
	}
	p := pieces{list: buf, ascend: true}
	for _, s := range spans {
		p.add(s, c.ends)
	}
	byDoc := func(a, b piece) int { return a.doc - b.doc }
	if !slices.IsSortedFunc(p.list, byDoc) {
		slices.SortStableFunc(p.list, byDoc)
		p.ascend = false
	}
	return p
}

// cutSlices returns the pieces of each slice, one slice after another. For ascending spans, a slice costs a search and
// its own spans.
func cutSlices(spans []Span, ranges []Range) pieces {
	var p pieces
	at := make([]int, len(spans))
	inOrder := true
	for i, s := range spans {
		at[i] = p.rows
		p.rows += s.Len
		inOrder = inOrder && (i == 0 || spans[i-1].end() <= s.Start)
	}
	for doc, r := range ranges {
		i := 0
		if inOrder {
			i = sort.Search(len(spans), func(i int) bool { return spans[i].end() > r.Lo })
		}
		for ; i < len(spans) && (!inOrder || spans[i].Start < r.Hi); i++ {
			s := spans[i]
			lo := min(max(ceilDiv(r.Lo-s.Start, s.Stride), 0), s.Len)
			hi := min(max(ceilDiv(r.Hi-s.Start, s.Stride), 0), s.Len)
			if lo < hi {
				part := Span{Start: s.Start + lo*s.Stride, Len: hi - lo, Stride: s.Stride}
				p.list = append(p.list, piece{Span: part, at: at[i] + lo, doc: doc})
			}
		}
	}
	p.ascend = rises(p.list)
	return p
}

// rises reports whether every local index of a slice exceeds all indices of earlier slices.
func rises(list []piece) bool {
	before, top := 0, 0 // one past the highest index of earlier slices, and of all so far
	for i, p := range list {
		if i > 0 && p.doc != list[i-1].doc {
			before = top
		}
		if p.at < before {
			return false
		}
		top = max(top, p.at+p.Len)
	}
	return true
}
