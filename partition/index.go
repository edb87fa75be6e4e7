package partition

import (
	"slices"
	"sort"
	"sync"
)

// Index answers questions about pairs of ranks of one Shape. It cuts the spans of every rank at
// the documents or slices once, so that a pair costs those that both ranks have tokens of, and
// never the positions. It is read-only once made: goroutines may share it.
type Index struct {
	bands    bands
	windowed bool     // keys are hidden on both sides of a query
	spans    [][]Span // of the keys of each rank
	q, k     []pieces // of each rank
	byK      cuts
	seqQ     int
	seqKV    int
	held     [][]held // of keys: who has part of each document; nil: not asked yet
	all      *pairs   // nil: not prepared
}

// NewIndex returns the index of s.
func NewIndex(s Shape) *Index {
	byQ, byK := s.Mask.cuts()
	x := &Index{bands: s.Mask.bands(), spans: AllSpans(s.Layout, s.SeqQ, s.Size), byK: byK, seqQ: s.SeqQ, seqKV: s.SeqKV}
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

// apart reports whether it is known that rank sees nothing of owner.
func (x *Index) apart(rank, owner int) bool { return x.all != nil && x.Needs(rank, owner).Len() == 0 }

// Needs returns the smallest range of owner's keys that holds every key that a query of rank sees:
// the hull of the K of Tiles, found without them. It is empty when nothing is visible.
func (x *Index) Needs(rank, owner int) Range {
	if x.all != nil {
		return find(x.all.of[rank], owner)
	}
	return needs(x.bands, &x.q[rank], &x.k[owner])
}

// NeedRanges returns the rows of owner's keys that queries of rank see, and no others: the least
// ranges, in order, with a gap between any two. They are the K of Tiles, found without them. There are
// none when nothing is visible. They lie in the memory of room, an empty slice, where that is enough.
func (x *Index) NeedRanges(room []Range, rank, owner int) []Range {
	if x.apart(rank, owner) {
		return room
	}
	return needRanges(room, x.bands, &x.q[rank], &x.k[owner])
}

// Keys returns the number of keys that owner holds.
func (x *Index) Keys(owner int) int { return x.k[owner].rows }

// piece is the part of a span that belongs to one document, or to one slice of a mask.
type piece struct {
	Span
	at  int // the local index of its first position
	doc int // its document; or its slice, which is treated like one
}

// pieces is a rank's positions, document by document; inside a document, in the order in which the
// rank stores them. A position that several slices have stands in each.
type pieces struct {
	list []piece
	rows int
	// ascend is set where local indices rise from document to document, so that the first
	// visible key stands in the first document that shows any.
	ascend bool
}

func cutAll(spans [][]Span, c cuts) []pieces {
	all, n := make([]pieces, len(spans)), len(c.ends)
	for r := range spans {
		n += len(spans[r])
	}
	room := make([]piece, 0, n) // spans of neighbours are cut once at each end
	for r := range spans {
		all[r] = c.cut(spans[r], room)
		list := &all[r].list
		n := len(*list)
		room, *list = (*list)[n:], (*list)[:n:n]
	}
	return all
}

// add appends the pieces of a span. A span of few positions in many documents costs a search a
// position, one of many positions in few documents a step a document.
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
			return // positions behind the last document see nothing
		}
		part := s
		part.Len = min(s.Len, ceilDiv(ends[doc]-s.Start, s.Stride))
		p.list = append(p.list, piece{Span: part, at: at, doc: doc})
		at += part.Len
		s.Len -= part.Len
		s.Start += part.Len * s.Stride
	}
}

// meet is the first pieces, from i and j on, of a document that both have; ok is false if there
// is none.
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

// seek is the first piece from i on of that document or one behind it. It doubles its steps, since
// what is sought is mostly near.
func seek(p []piece, i, doc int) int {
	step := 1
	for i+step < len(p) && p[i+step].doc < doc {
		i += step
		step *= 2
	}
	n := min(step, len(p)-1-i)
	return i + 1 + sort.Search(n, func(d int) bool { return p[i+1+d].doc >= doc })
}

// run is one past the last piece of the document of piece i.
func run(p []piece, i int) int {
	n := i + 1
	for n < len(p) && p[n].doc == p[i].doc {
		n++
	}
	return n
}

// sees reports whether a query of a sees a key of b; both are of one document. Of two strides that
// do not fit it may be wrong by saying yes.
func sees(band Band, a, b *piece) bool {
	return band.meets(Range{a.Start, a.end()}, Range{b.Start, b.end()})
}

// meets reports whether it shows a query of some positions a key of others.
func (b Band) meets(q, k Range) bool { return k.Hi-1-q.Lo >= b.Lo && k.Lo-(q.Hi-1) <= b.Hi }

// tile is the pairs of a piece of queries and one of keys of the same document; ok is false where
// none is visible.
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

// scratch is memory for tiles before they are joined.
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

// needRanges is the union of what within would take the hull of. A query sees keys without a gap in
// each piece, and the next query the ones beside them. It works in the memory of all, where that has room.
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

// union is ranges in order, without those that touch. It works in the memory of r.
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

// lastNeeds is the keys that are visible in the last document that shows any.
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

// within is the keys of pieces of one document that its queries see: the hull of the K of the trimmed tiles. Local indices
// rise from piece to piece, so that it goes from the first piece that shows any to the last.
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

// shown is the keys of one piece that queries of its document see. The last of these mostly sees all.
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
