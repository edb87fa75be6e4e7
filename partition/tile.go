package partition

import (
	"fmt"
	"math"
)

// Range is the indices [Lo, Hi).
type Range struct{ Lo, Hi int }

// Len returns the number of indices.
func (r Range) Len() int { return r.Hi - r.Lo }

// Hull returns the smallest range that holds both; an empty one holds nothing.
func (r Range) Hull(b Range) Range {
	switch {
	case r.Len() == 0:
		return b
	case b.Len() == 0:
		return r
	}
	return Range{min(r.Lo, b.Lo), max(r.Hi, b.Hi)}
}

// Unbounded is a Lo or Hi of a Band that hides nothing. It is far enough below the largest int that
// the sum of a bound and an index does not overflow.
const Unbounded = math.MaxInt / 4

// Band says that key j is visible to query i when Lo <= j-i <= Hi. Full, causal,
// bottom-right, sliding-window and any other diagonal mask are bands.
type Band struct{ Lo, Hi int }

// Full hides nothing.
func Full() Band { return Band{-Unbounded, Unbounded} }

// Causal returns the band of a causal mask over as many queries as keys: a query sees its own position
// and all before it.
func Causal() Band { return Band{-Unbounded, 0} }

// Sees reports whether query i sees key j.
func (b Band) Sees(i, j int) bool { return b.Lo <= j-i && j-i <= b.Hi }

// Windows returns the bands of causal masks with these windows, as in NewMask, over as many queries as keys.
func Windows(windows []int) []Band {
	bands := make([]Band, len(windows))
	for i, w := range windows {
		bands[i] = Causal()
		if w >= 0 {
			bands[i].Lo = -min(w, Unbounded)
		}
	}
	return bands
}

// Tile is a rectangle of work in local indices: the pairs of a query in Q and a key in K
// that Band lets see each other. The band speaks of the same local indices as the ranges,
// so a tile may be cut at will without changing its band.
type Tile struct {
	Q, K Range
	Band Band
}

// Pairs returns the number of visible (query, key) pairs, the tile's work, at most the largest integer.
func (t Tile) Pairs() int { return t.count().int() }

// Pairs returns the pairs of several tiles, at most the largest integer.
func Pairs(tiles []Tile) int {
	n := count{}
	for _, t := range tiles {
		n = n.plus(t.count())
	}
	return n.int()
}

func (t Tile) count() count {
	return strip{first: t.Q.Lo - t.K.Lo, stride: 1, m: t.Q.Len(), n: t.K.Len()}.pairs(t.Band)
}

// Trim shrinks a tile to the bounding box of its visible pairs and its band to the
// diagonals of that box, which makes tiles with the same pairs equal. ok is false for a
// tile without pairs.
func (t Tile) Trim() (_ Tile, ok bool) {
	// A row i has keys when [i+Lo, i+Hi] meets K; likewise a column.
	t.Q = Range{max(t.Q.Lo, t.K.Lo-t.Band.Hi), min(t.Q.Hi, t.K.Hi-t.Band.Lo)}
	if t.Q.Lo >= t.Q.Hi || t.Band.Lo > t.Band.Hi {
		return t, false
	}
	t.K = Range{max(t.K.Lo, t.Q.Lo+t.Band.Lo), min(t.K.Hi, t.Q.Hi+t.Band.Hi)}
	if t.K.Lo >= t.K.Hi {
		return t, false
	}
	t.Band = Band{max(t.Band.Lo, t.K.Lo-(t.Q.Hi-1)), min(t.Band.Hi, t.K.Hi-1-t.Q.Lo)}
	return t, t.Band.Lo <= t.Band.Hi
}

// A weighed is a tile and its pairs, once somebody has asked; no tile here has none.
type weighed struct {
	Tile
	known count
}

func (t *weighed) pairs() count {
	if t.known == (count{}) {
		t.known = t.count()
	}
	return t.known
}

func (t *Tile) row(i int) int {
	if i < t.Q.Lo || i >= t.Q.Hi {
		return 0
	}
	return max(0, min(t.K.Hi, i+t.Band.Hi+1)-max(t.K.Lo, i+t.Band.Lo))
}

// join returns the one tile with the pairs of both, if there is one. a and b are trimmed and share no pair. The only
// candidate is the smallest box and band around both: any tile with their pairs contains it, so it is right exactly if
// it has no further pair. Most wrong candidates need no count: if rows or columns lie between the two, a band shows a
// pair in each of them, since it is convex; and the first and last rows often differ.
func join(a, b *weighed) (weighed, bool) {
	if apart(a.Q, b.Q) || apart(a.K, b.K) {
		return weighed{}, false
	}
	t := Tile{
		Q:    Range{min(a.Q.Lo, b.Q.Lo), max(a.Q.Hi, b.Q.Hi)},
		K:    Range{min(a.K.Lo, b.K.Lo), max(a.K.Hi, b.K.Hi)},
		Band: Band{min(a.Band.Lo, b.Band.Lo), max(a.Band.Hi, b.Band.Hi)},
	}
	for _, i := range [2]int{t.Q.Lo, t.Q.Hi - 1} {
		if t.row(i) != a.row(i)+b.row(i) {
			return weighed{}, false
		}
	}
	n := a.pairs().plus(b.pairs())
	return weighed{t, n}, t.count() == n
}

func apart(a, b Range) bool { return a.Hi < b.Lo || b.Hi < a.Lo }

// joinWindow is the number of earlier tiles that a new tile may join. Tiles that share an edge are neighbours of the
// same document, so few suffice; all pairs of a thousand documents would be a million trials.
const joinWindow = 4

// joinAll joins tiles that share an edge until none does. It works in the memory of tiles; what
// it returns is a copy.
func joinAll(tiles []weighed) []Tile {
	for {
		out := tiles[:0]
		for _, t := range tiles {
			for k := len(out) - 1; k >= max(0, len(out)-joinWindow); k-- {
				if u, ok := join(&out[k], &t); ok {
					t = u
					out = append(out[:k], out[k+1:]...)
					k = len(out)
				}
			}
			out = append(out, t)
		}
		if len(out) == len(tiles) {
			break
		}
		tiles = out
	}
	if len(tiles) == 0 {
		return nil
	}
	plain := make([]Tile, len(tiles))
	for i := range tiles {
		plain[i] = tiles[i].Tile
	}
	return plain
}

// Shape is the partition of one attention: its mask over seqQ queries and seqKV keys, both
// laid out alike over size ranks.
type Shape struct {
	SeqQ, SeqKV int // global tokens
	Size        int // ranks
	Layout      Layout
	Mask        Mask
}

// Plan lists the tiles between rank's queries and owner's keys, in local indices of the
// two, trimmed and joined; nil when nothing is visible. An Index answers for many pairs.
func Plan(s Shape, rank, owner int) []Tile {
	byQ, byK := s.Mask.cuts()
	q := byQ.cut(s.Layout.Spans(s.SeqQ, s.Size, rank), nil)
	k := byK.cut(s.Layout.Spans(s.SeqKV, s.Size, owner), nil)
	return tilesOf(s.Mask.bands(), &q, &k)
}

func (b Band) shift(d int) Band { return Band{b.Lo + d, b.Hi + d} }

// localBand converts a band over global positions to indices of two spans of one stride n: lo <= (k+n*j) - (q+n*i) <=
// hi becomes a bound on j-i. A span of a single position has only the index 0, so any stride fits it.
func localBand(b Band, q, k Span) Band {
	n := q.Stride
	if q.Len == 1 {
		n = k.Stride
	}
	if q.Len > 1 && k.Len > 1 && q.Stride != k.Stride {
		panic(fmt.Sprintf("partition: spans of strides %d and %d in one layout", q.Stride, k.Stride))
	}
	return Band{ceilDiv(b.Lo-k.Start+q.Start, n), floorDiv(b.Hi-k.Start+q.Start, n)}
}

// Work returns the visible pairs of every rank, each at most the largest integer: Balance divides
// their mean by their maximum. Every key is on some rank, so only the queries matter.
func Work(s Shape) []int {
	return NewIndex(s).Work()
}

// Balance returns the mean over the maximum of the ranks' work: 1 when all work alike. A mask
// that hides everything is balanced.
func Balance(work []int) float64 {
	total, most := count{}, 0
	for _, w := range work {
		total = total.plus(count{lo: uint64(w)})
		most = max(most, w)
	}
	if most == 0 {
		return 1
	}
	return total.float() / float64(len(work)) / float64(most)
}
