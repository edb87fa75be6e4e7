package partition

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sort"
)

// Mask selects the keys that each query of the whole sequence sees, in global positions: by a band,
// inside documents if there are any; or by slices, in place of both. The zero Band counts as not set,
// an error: see Check.
type Mask struct {
	Band
	// Docs are the lengths of packed documents, in order; they sum to the sequence
	// length. A query sees keys of its own document alone. Empty: one document.
	Docs []int
	// Slices are rectangles of the sequence, each with a band of its own. A pair outside all of them is
	// hidden. No pair is in two of them. Where there are any, Band only bounds theirs, and there are
	// no Docs.
	Slices []Tile
	// Stands aligns queries with keys if documents, or an alignment at the top left, decide; see
	// Shape.Aligned. It hides and shows nothing.
	Stands []Stand
}

// Stand aligns the queries between the End of the Stand before it and its own: query i with key i + Ahead.
type Stand struct{ End, Ahead int }

// Aligned returns the key that query i is aligned with: the last one that a causal mask of its document
// shows. Windows and distances count from it. It may lie outside the sequence.
func (s *Shape) Aligned(i int) int {
	if n := sort.Search(len(s.Mask.Stands),
		func(n int) bool { return i < s.Mask.Stands[n].End }); n < len(s.Mask.Stands) {
		return i + s.Mask.Stands[n].Ahead
	}
	return i + s.SeqKV - s.SeqQ
}

// Diagonal is a mask of attention by its distances from a diagonal, whatever the lengths. The
// diagonal ends at the bottom right corner: of m queries and n keys, query i is aligned with key
// i + n - m. With TopLeft it begins at the top left corner, and query i is aligned with key i.
type Diagonal struct {
	Causal  bool // a query sees no key after its aligned one
	TopLeft bool
	// Left and Right are the window: the numbers of keys before and after that one; negative: all.
	Left, Right int
}

// ahead returns the distance from a query's own number to its aligned key.
func (d Diagonal) ahead(queries, keys int) int {
	if d.TopLeft {
		return 0
	}
	return keys - queries
}

// band returns the diagonal as a band of j-i over those lengths.
func (d Diagonal) band(queries, keys int) Band {
	at := d.ahead(queries, keys)
	b := Full()
	if d.Right >= 0 {
		b.Hi = at + min(d.Right, Unbounded)
	}
	if d.Causal {
		b.Hi = min(b.Hi, at)
	}
	if d.Left >= 0 {
		b.Lo = at - min(d.Left, Unbounded)
	}
	return b
}

// NewMask returns the mask of a config: causal or full, with a window of that many keys before
// a query's own (negative: no window), aligned at the bottom right: query i with key i + seqKV - seqQ.
func NewMask(causal bool, window, seqQ, seqKV int, docs []int) (Mask, error) {
	return Diagonal{Causal: causal, Left: window, Right: -1}.Mask(seqQ, seqKV, docs, nil)
}

// Mask returns the mask over seqQ queries and seqKV keys. Docs are the lengths of packed documents in
// queries, docsKV in keys; without docsKV they are the same. Each document has a diagonal of its own, by
// its two lengths, which may be 0. No docs: one document.
func (d Diagonal) Mask(seqQ, seqKV int, docs, docsKV []int) (Mask, error) {
	if docsKV == nil || len(docs)+len(docsKV) == 0 {
		m := Mask{Band: d.band(seqQ, seqKV), Docs: docs}
		if d.TopLeft && seqQ != seqKV || m.Band == (Band{}) {
			m.Stands = []Stand{{seqQ, 0}}
		}
		switch {
		case len(docs) == 0:
			return m, nil
		case seqQ != seqKV:
			return m, fmt.Errorf("documents need as many queries (%d) as keys (%d), or lengths in keys of their own",
				seqQ, seqKV)
		}
		return m, fits(docs, seqQ)
	}
	if len(docs) != len(docsKV) {
		return Mask{}, fmt.Errorf("document lengths: %d in queries, %d in keys",
			len(docs), len(docsKV))
	}
	if err := fits(docs, seqQ); err != nil {
		return Mask{}, fmt.Errorf("lengths in queries: %w", err)
	}
	if err := fits(docsKV, seqKV); err != nil {
		return Mask{}, fmt.Errorf("lengths in keys: %w", err)
	}
	var tiles []Tile
	stands := make([]Stand, len(docs))
	q, k := 0, 0
	for i := range docs {
		stands[i] = Stand{q + docs[i], k - q + d.ahead(docs[i], docsKV[i])}
		t := Tile{Q: Range{0, docs[i]}, K: Range{0, docsKV[i]}, Band: d.band(docs[i], docsKV[i])}
		if t, ok := t.Trim(); ok {
			tiles = append(tiles, t.move(q, k))
		}
		q, k = q+docs[i], k+docsKV[i]
	}
	m := sliced(tiles)
	m.Stands = stands
	return m, nil
}

// Check returns an error for a mask without a band. A mask by which each query sees its own position alone has
// the zero Band too: NewMask makes it, and sets Stands.
func (m *Mask) Check() error {
	if m.Band == (Band{}) && len(m.Slices) == 0 && len(m.Stands) == 0 {
		return errors.New("partition: Mask.Band is not set: set it to Full() or Causal(), " +
			"or make the mask with NewMask")
	}
	return nil
}

func sliced(tiles []Tile) Mask {
	if len(tiles) == 0 {
		return Mask{Band: Band{1, 0}} // hides everything
	}
	m := Mask{Band: tiles[0].Band, Slices: tiles}
	for _, t := range tiles {
		m.Band = Band{min(m.Lo, t.Band.Lo), max(m.Hi, t.Band.Hi)}
	}
	return m
}

func (t Tile) move(q, k int) Tile {
	return Tile{Q: Range{t.Q.Lo + q, t.Q.Hi + q}, K: Range{t.K.Lo + k, t.K.Hi + k}, Band: t.Band.shift(k - q)}
}

// bands holds the bands of a mask by document or slice, or one for all.
type bands []Band

func (b bands) of(doc int) Band {
	if len(b) == 1 {
		return b[0]
	}
	return b[doc]
}

func (m *Mask) bands() bands {
	if len(m.Slices) == 0 {
		return bands{m.Band}
	}
	b := make(bands, len(m.Slices))
	for i, t := range m.Slices {
		b[i] = t.Band
	}
	return b
}

// Key returns a string for caches that is equal for equal shapes.
func (s Shape) Key() string {
	b := make([]byte, 0, 64+3*len(s.Mask.Docs)+18*len(s.Mask.Slices))
	b = appendInts(b, s.SeqQ, s.SeqKV, s.Size, s.Mask.Lo, s.Mask.Hi)
	b = appendList(b, s.Mask.Docs)
	b = appendInts(b, len(s.Mask.Slices))
	for _, t := range s.Mask.Slices {
		b = appendInts(b, t.Q.Lo, t.Q.Hi, t.K.Lo, t.K.Hi, t.Band.Lo, t.Band.Hi)
	}
	b = appendInts(b, len(s.Mask.Stands))
	for _, x := range s.Mask.Stands {
		b = appendInts(b, x.End, x.Ahead)
	}
	layout := s.Layout
	if r, ok := layout.(ready); ok {
		layout = r.Layout
	}
	switch l := layout.(type) {
	case Document:
		b = appendList(append(b, l.Name()...), l.Docs)
		for _, x := range l.Bands {
			b = appendInts(b, x.Lo, x.Hi)
		}
	case DocumentZigzag:
		b = appendList(append(b, l.Name()...), l.Docs)
	default:
		b = fmt.Appendf(b, "%#v", l)
	}
	return string(b)
}

func appendList(b []byte, list []int) []byte { return appendInts(appendInts(b, len(list)), list...) }

func appendInts(b []byte, list ...int) []byte {
	for _, x := range list {
		b = binary.AppendVarint(b, int64(x))
	}
	return b
}
