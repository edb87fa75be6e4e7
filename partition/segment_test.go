package partition

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// halves cuts the spans of a layout in halves and stores them in order, or from the last to the first.
type halves struct {
	Layout
	reversed bool
}

func (l halves) Spans(seqLen, size, rank int) (list []Span) {
	for _, s := range l.Layout.Spans(seqLen, size, rank) {
		half := Span{s.Start, s.Len / 2, 1}
		if half.Len > 0 {
			list = append(list, half)
		}
		list = append(list, Span{half.end(), s.Len - half.Len, 1})
	}
	if l.reversed {
		slices.Reverse(list)
	}
	return list
}

// segmentsOf returns segments by their definition: it visits the positions one by one.
func segmentsOf(s Shape) []Segment {
	type row struct{ rank, at int }
	where := make([]row, s.SeqQ)
	for r, spans := range AllSpans(s.Layout, s.SeqQ, s.Size) {
		for at, pos := range Positions(spans) {
			where[pos] = row{r, at}
		}
	}
	docs := s.Mask.Docs
	if len(docs) == 0 {
		docs = []int{s.SeqQ}
	}
	var all []Segment
	pos := 0
	for doc, n := range docs {
		for i := range n {
			w := where[pos]
			if k := len(all) - 1; i > 0 && all[k].Rank == w.rank && all[k].Rows.Hi == w.at {
				all[k].Rows.Hi++
			} else {
				all = append(all, Segment{Doc: doc, Rank: w.rank, Rows: Range{w.at, w.at + 1}, Start: pos})
			}
			pos++
		}
	}
	for i := range all {
		for _, other := range all {
			if other.Rank == all[i].Rank && other.Rows.Lo < all[i].Rows.Lo {
				all[i].Place++
			}
		}
	}
	return all
}

func TestSegments(t *testing.T) {
	rng := rand.New(rand.NewPCG(61, 62))
	seen := map[string]int{} // the cases that the draws must contain
	for range 1000 {
		s := Shape{SeqQ: 1 + rng.IntN(80), Size: 1 + rng.IntN(33)}
		s.SeqKV = s.SeqQ
		docs := randomDocs(rng, s.SeqQ)
		if rng.IntN(4) > 0 {
			if rng.IntN(3) == 0 {
				docs = append(docs, 0) // an empty document
			}
			s.Mask.Docs = docs
		}
		all := []Layout{Contiguous{}, Zigzag{}, Window{Rows: 5}, Document{Docs: docs}, DocumentZigzag{Docs: docs}}
		if s.Layout = all[rng.IntN(len(all))]; rng.IntN(3) == 0 {
			s.Layout = halves{s.Layout, rng.IntN(2) == 0}
		}
		x, err := NewSegments(s)
		if err != nil {
			t.Fatal(err)
		}
		if want := segmentsOf(s); !slices.Equal(x.All, want) {
			t.Fatalf("%+v: segments %v, want %v", s, x.All, want)
		}
		next := 0
		for doc, r := range x.Docs {
			if r.Len() == 0 {
				seen["empty document"]++
				continue
			}
			if r.Lo != next || x.All[r.Lo].Doc != doc || x.All[r.Hi-1].Doc != doc {
				t.Fatalf("%+v: document %d has segments %v of %v", s, doc, r, x.All)
			}
			next = r.Hi
		}
		if next != len(x.All) || len(x.Docs) != max(1, len(s.Mask.Docs)) {
			t.Fatalf("%+v: documents %v hold %d of %d segments", s, x.Docs, next, len(x.All))
		}
		own := 0
		for rank, list := range x.Own {
			own += len(list)
			for place, i := range list {
				if x.All[i].Rank != rank || x.All[i].Place != place {
					t.Fatalf("%+v: segment %d of rank %d is %+v", s, place, rank, x.All[i])
				}
			}
		}
		if own != len(x.All) {
			t.Fatalf("%+v: ranks have %d of %d segments", s, own, len(x.All))
		}
		for i := range x.All[1:] {
			a, b := &x.All[i], &x.All[i+1]
			switch {
			case a.Doc == b.Doc && a.Rank == b.Rank:
				seen["two of one rank"]++
			case a.Doc != b.Doc && a.Rank == b.Rank && a.Rows.Hi == b.Rows.Lo:
				seen["cut at a document only"]++
			}
		}
	}
	for _, what := range []string{"empty document", "two of one rank", "cut at a document only"} {
		if seen[what] == 0 {
			t.Errorf("no case of: %s", what)
		}
	}
}

// The two middle chunks of a zigzag are neighbours on the last rank.
func TestZigzagHasOneSegmentLessThanChunks(t *testing.T) {
	x, err := NewSegments(Shape{SeqQ: 1 << 40, SeqKV: 1 << 40, Size: 8, Layout: Zigzag{}})
	if err != nil || len(x.All) != 15 {
		t.Fatalf("%d segments, error %v; want 15", len(x.All), err)
	}
}

func TestNoSegments(t *testing.T) {
	docs := []int{4, 4}
	for want, s := range map[string]Shape{
		"contiguous": {SeqQ: 8, SeqKV: 8, Size: 2, Layout: Striped{}}, // it lists the choices
		"Mask.Docs": {SeqQ: 8, SeqKV: 8, Size: 2, Layout: Zigzag{},
			Mask: Mask{Slices: []Tile{{Q: Range{0, 8}, K: Range{0, 8}, Band: Causal()}}}},
		"": {SeqQ: 8, SeqKV: 8, Size: 2, Layout: Document{Docs: docs}, Mask: Mask{Docs: docs}},
	} {
		_, err := NewSegments(s)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}
