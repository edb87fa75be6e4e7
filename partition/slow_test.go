package partition

import (
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
)

// slowTiles implements the definition of Index.Tiles: document by document, it trims every span of queries with every
// span of keys. Then it joins each tile with one of the few before it until no join is left.
func slowTiles(s Shape, rank, owner int) []Tile {
	qs, ks := s.Layout.Spans(s.SeqQ, s.Size, rank), s.Layout.Spans(s.SeqKV, s.Size, owner)
	docs := s.Mask.Docs
	if len(docs) == 0 {
		docs = []int{max(s.SeqQ, s.SeqKV)}
	}
	var tiles []Tile
	lo := 0
	for _, n := range docs {
		qAt := 0
		for _, q := range qs {
			kAt := 0
			for _, k := range ks {
				t := Tile{Q: slowWithin(q, lo, lo+n, qAt), K: slowWithin(k, lo, lo+n, kAt),
					Band: localBand(s.Mask.Band, q, k).shift(kAt - qAt)}
				if t, ok := t.Trim(); ok {
					tiles = append(tiles, t)
				}
				kAt += k.Len
			}
			qAt += q.Len
		}
		lo += n
	}
	for {
		var out []Tile
		for _, t := range tiles {
			for k := len(out) - 1; k >= max(0, len(out)-joinWindow); k-- {
				a := out[k]
				u := Tile{
					Q:    Range{min(a.Q.Lo, t.Q.Lo), max(a.Q.Hi, t.Q.Hi)},
					K:    Range{min(a.K.Lo, t.K.Lo), max(a.K.Hi, t.K.Hi)},
					Band: Band{min(a.Band.Lo, t.Band.Lo), max(a.Band.Hi, t.Band.Hi)},
				}
				if u.Pairs() == a.Pairs()+t.Pairs() {
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

// slowWithin returns the local indices of a span's positions in [lo, hi), one by one.
func slowWithin(s Span, lo, hi, at int) Range {
	r := Range{at, at}
	for i := range s.Len {
		if p := s.Start + i*s.Stride; p < lo {
			r.Lo++
			r.Hi++
		} else if p < hi {
			r.Hi++
		}
	}
	return r
}

// gathered is a layout after an exchange of heads: each rank holds the spans of several ranks of another layout one
// after another, not in ascending order.
type gathered struct {
	Layout
	inner int
}

func (g gathered) Spans(n, size, rank int) []Span {
	var s []Span
	for i := range g.inner {
		s = append(s, g.Layout.Spans(n, size*g.inner, rank*g.inner+i)...)
	}
	return s
}

func randomShape(rng *rand.Rand, most int) (Shape, []Layout) {
	s := Shape{SeqQ: 1 + rng.IntN(most), Size: 1 + rng.IntN(9)}
	s.SeqKV = s.SeqQ
	var docs []int
	switch rng.IntN(4) {
	case 0:
		docs = randomDocs(rng, s.SeqQ)
	case 1:
		for n := s.SeqQ; n > 0; n -= docs[len(docs)-1] {
			docs = append(docs, 1+rng.IntN(min(n, 7)))
		}
	case 2:
		s.SeqKV = 1 + rng.IntN(most)
	}
	s.Mask, _ = NewMask(rng.IntN(3) > 0, rng.IntN(12)-4, s.SeqQ, s.SeqKV, docs)
	all := layouts(docs)
	for _, l := range all[:len(all):len(all)] {
		all = append(all, gathered{l, 1 + rng.IntN(3)})
	}
	return s, all
}

// An index equals the definition for spans in any order.
func TestIndexIsTheDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for i := range 80 {
		most := 50
		if i%50 == 0 {
			most = 250
		}
		s, all := randomShape(rng, most)
		for _, s.Layout = range all {
			x, prepared := NewIndex(s), NewIndex(s)
			prepared.Prepare()
			work := make([]int, s.Size)
			for r := range s.Size {
				for o := range s.Size {
					want := slowTiles(s, r, o)
					if got := x.Tiles(r, o); !reflect.DeepEqual(got, want) {
						t.Fatalf("%+v: tiles of %d and %d are %v, want %v", s, r, o, got, want)
					}
					if got := Plan(s, r, o); !reflect.DeepEqual(got, want) {
						t.Fatalf("%+v: Plan(%d, %d) = %v, want %v", s, r, o, got, want)
					}
					var need Range
					for _, w := range want {
						need = need.Hull(w.K)
						work[r] += w.Pairs()
					}
					if got := prepared.Needs(r, o); got != need {
						t.Fatalf("%+v, prepared: %d needs rows %v of %d, want %v", s, r, got, o, need)
					}
					if got := x.Needs(r, o); got != need {
						t.Fatalf("%+v: %d needs rows %v of %d, want %v", s, r, got, o, need)
					}
				}
				if n := Count(s.Layout.Spans(s.SeqKV, s.Size, r)); x.Keys(r) != n {
					t.Fatalf("%+v: rank %d holds %d keys, want %d", s, r, x.Keys(r), n)
				}
			}
			if got := Work(s); !reflect.DeepEqual(got, work) {
				t.Fatalf("%+v: Work = %v, want %v", s, got, work)
			}
			checkCover(t, s)
		}
	}
}

// least returns the lowest balance of a long sequence. The document layout stops when more keys would cost more than
// better balance gains.
func least(l Layout) float64 {
	switch l.Name() {
	case "document":
		return 1 / (1 + evenEnough)
	case "contiguous", "window": // the window of a test is short
		return 0
	}
	return 0.999
}

// The pairs of a very long sequence overflow 64 bits; results that depend on them are still right.
func TestVeryLongSequences(t *testing.T) {
	const n = 1 << 34
	for _, l := range layouts([]int{n}) {
		s := Shape{SeqQ: n, SeqKV: n, Size: 1024, Layout: l, Mask: causal()}
		work := Work(s)
		total := count{}
		for _, w := range work {
			total = total.plus(count{lo: uint64(w)})
		}
		if want := product(n, n+1).half(); total != want {
			t.Errorf("%s: %d ranks do %v pairs, want %v", l.Name(), s.Size, total, want)
		}
		if b := Balance(work); b < least(l) || b > 1 {
			t.Errorf("%s: balance %v", l.Name(), b)
		}
		x := NewIndex(s)
		for _, pair := range [][2]int{{0, 0}, {0, 1023}, {1023, 0}, {511, 512}, {512, 511}} {
			x.Tiles(pair[0], pair[1])
			x.Needs(pair[0], pair[1])
		}
	}
	whole := Shape{SeqQ: 1 << 40, SeqKV: 1 << 40, Size: 1, Layout: Contiguous{}, Mask: causal()}
	if w := Work(whole); w[0] != math.MaxInt {
		t.Errorf("a sequence of 1T tokens has %d pairs, want the largest integer", w[0])
	}
	if got := Plan(whole, 0, 0); len(got) != 1 || got[0].Pairs() != math.MaxInt {
		t.Errorf("a sequence of 1T tokens is planned as %v", got)
	}
	m, err := NewMask(true, 4095, 1<<40, 1<<40, nil)
	if err != nil {
		t.Fatal(err)
	}
	whole.Mask = m
	if got, want := Work(whole)[0], 4096*(1<<40)-4096*4095/2; got != want {
		t.Errorf("a sequence of 1T tokens has %d pairs in a window, want %d", got, want)
	}
}
