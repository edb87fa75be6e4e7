package partition

import (
	"fmt"
	"math"
)

// Range is the indices [Lo, Hi).
type Range struct{ Lo, Hi int }

// Len is the number of indices.
func (r Range) Len() int { return r.Hi - r.Lo }

// Unbounded is a Lo or Hi of a Band that hides nothing. Half of the integers is left so
// that sums of a bound and an index do not overflow.
const Unbounded = math.MaxInt / 4

// Band says that key j is visible to query i when Lo <= j-i <= Hi. Full, causal,
// bottom-right, sliding-window and any other diagonal mask are bands.
type Band struct{ Lo, Hi int }

// Full hides nothing.
func Full() Band { return Band{-Unbounded, Unbounded} }

// Sees reports whether query i sees key j.
func (b Band) Sees(i, j int) bool { return b.Lo <= j-i && j-i <= b.Hi }

// Mask is what a query of the whole sequence may see, in global positions.
type Mask struct {
	Band
	// Docs are the lengths of packed documents, in order; they sum to the sequence
	// length. A query sees keys of its own document alone. Empty: one document.
	Docs []int
}

// NewMask is the mask of a config: causal or full, with a window of so many keys before
// a query's own (negative: no window), aligned at the bottom right where there are more
// keys than queries or fewer: query i stands at key i + seqKV - seqQ.
func NewMask(causal bool, window, seqQ, seqKV int, docs []int) (Mask, error) {
	if len(docs) > 0 {
		for i, n := range docs {
			if n <= 0 {
				return Mask{}, fmt.Errorf("document %d has %d tokens", i, n)
			}
		}
		if seqQ != seqKV {
			return Mask{}, fmt.Errorf("documents need as many queries (%d) as keys (%d)", seqQ, seqKV)
		}
		if sum(docs) != seqQ {
			return Mask{}, fmt.Errorf("documents hold %d tokens, the sequence %d", sum(docs), seqQ)
		}
	}
	b := Full()
	if causal {
		b.Hi = seqKV - seqQ
	}
	if window >= 0 {
		b.Lo = seqKV - seqQ - min(window, Unbounded)
	}
	return Mask{Band: b, Docs: docs}, nil
}

// Tile is a rectangle of work in local indices: the pairs of a query in Q and a key in K
// that Band lets see each other. The band speaks of the same local indices as the ranges,
// so a tile may be cut at will without changing its band.
type Tile struct {
	Q, K Range
	Band Band
}

// Pairs is the number of visible (query, key) pairs: the tile's work.
func (t Tile) Pairs() int {
	return t.below(t.Band.Hi) - t.below(t.Band.Lo-1)
}

// below counts the pairs of the rectangle with j-i <= d.
func (t Tile) below(d int) int {
	// Row i holds clamp(i+d+1-K.Lo, 0, n) of them, which rises by one a row: a run of
	// zeros, a ramp, and a run of full rows.
	m, n := t.Q.Len(), t.K.Len()
	first := t.Q.Lo + d + 1 - t.K.Lo // count of row 0, unclamped
	zeros := min(max(-first+1, 0), m)
	full := min(max(first+m-n, 0), m) // rows i with first+i >= n
	ramp := max(m-zeros-full, 0)
	lowest := first + zeros
	return ramp*lowest + ramp*(ramp-1)/2 + full*n
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

// join is the one tile with the pairs of both, if there is one. a and b are trimmed and
// share no pair. The smallest box and band around both is the only candidate: any tile with
// their pairs contains it, so it is right exactly when it holds no pair more.
func join(a, b Tile) (Tile, bool) {
	t := Tile{
		Q:    Range{min(a.Q.Lo, b.Q.Lo), max(a.Q.Hi, b.Q.Hi)},
		K:    Range{min(a.K.Lo, b.K.Lo), max(a.K.Hi, b.K.Hi)},
		Band: Band{min(a.Band.Lo, b.Band.Lo), max(a.Band.Hi, b.Band.Hi)},
	}
	return t, t.Pairs() == a.Pairs()+b.Pairs()
}

// joinWindow is how many tiles back a new tile looks for one to join with. Tiles that share
// an edge are neighbours of the same document, so few are enough; all pairs of a thousand
// documents would be a million trials.
const joinWindow = 4

// joinAll joins tiles that share an edge until none does.
func joinAll(tiles []Tile) []Tile {
	for {
		out := tiles[:0:0]
		for _, t := range tiles {
			for k := len(out) - 1; k >= max(0, len(out)-joinWindow); k-- {
				if u, ok := join(out[k], t); ok {
					t = u
					out = append(out[:k], out[k+1:]...)
					k = len(out)
				}
			}
			out = append(out, t)
		}
		if len(out) == len(tiles) {
			return out
		}
		tiles = out
	}
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
// two, trimmed and joined; none when nothing is visible.
func Plan(s Shape, rank, owner int) []Tile {
	qs, ks := s.Layout.Spans(s.SeqQ, s.Size, rank), s.Layout.Spans(s.SeqKV, s.Size, owner)
	qAt, kAt := starts(qs), starts(ks)
	var tiles []Tile
	docLo := 0
	for d := 0; d < max(1, len(s.Mask.Docs)); d++ {
		qHi, kHi := s.SeqQ, s.SeqKV
		if len(s.Mask.Docs) > 0 {
			qHi, kHi = docLo+s.Mask.Docs[d], docLo+s.Mask.Docs[d]
		}
		q0, q1 := overlapping(qs, docLo, qHi)
		k0, k1 := overlapping(ks, docLo, kHi)
		for a := q0; a < q1; a++ {
			for b := k0; b < k1; b++ {
				t := Tile{
					Q:    qs[a].within(docLo, qHi).shift(qAt[a]),
					K:    ks[b].within(docLo, kHi).shift(kAt[b]),
					Band: localBand(s.Mask.Band, qs[a], ks[b]).shift(kAt[b] - qAt[a]),
				}
				if t, ok := t.Trim(); ok {
					tiles = append(tiles, t)
				}
			}
		}
		docLo = qHi
	}
	return joinAll(tiles)
}

func (r Range) shift(d int) Range { return Range{r.Lo + d, r.Hi + d} }

func (b Band) shift(d int) Band { return Band{b.Lo + d, b.Hi + d} }

// localBand turns a band over global positions into one over indices of two spans of one
// stride n: lo <= (k+n*j) - (q+n*i) <= hi becomes a bound on j-i. A span of a single
// position has only the index 0, so any stride is right for it.
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

// Work is the visible pairs of every rank: Balance divides their mean by their maximum.
func Work(s Shape) []int {
	w := make([]int, s.Size)
	for r := range w {
		for o := range s.Size {
			for _, t := range Plan(s, r, o) {
				w[r] += t.Pairs()
			}
		}
	}
	return w
}

// Balance is the mean over the maximum of the ranks' work: 1 when all work alike. A mask
// that hides everything is balanced.
func Balance(work []int) float64 {
	total, most := 0, 0
	for _, w := range work {
		total += w
		most = max(most, w)
	}
	if most == 0 {
		return 1
	}
	return float64(total) / float64(len(work)) / float64(most)
}
