package partition

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

// maskSees implements the definition that plans are compared with: global positions, no tiles.
func maskSees(m Mask, i, j int) bool {
	if !m.Sees(i, j) {
		return false
	}
	lo := 0
	for _, n := range m.Docs {
		if i < lo+n {
			return j >= lo && j < lo+n
		}
		lo += n
	}
	return true
}

// cover counts, for every global (query, key) pair, the tiles that hold it.
func cover(s Shape) [][]int {
	n := make([][]int, s.SeqQ)
	for i := range n {
		n[i] = make([]int, s.SeqKV)
	}
	for r := range s.Size {
		q := Positions(s.Layout.Spans(s.SeqQ, s.Size, r))
		for o := range s.Size {
			k := Positions(s.Layout.Spans(s.SeqKV, s.Size, o))
			for _, t := range Plan(s, r, o) {
				for i := t.Q.Lo; i < t.Q.Hi; i++ {
					for j := t.K.Lo; j < t.K.Hi; j++ {
						if t.Band.Sees(i, j) {
							n[q[i]][k[j]]++
						}
					}
				}
			}
		}
	}
	return n
}

func checkCover(t *testing.T, s Shape) {
	t.Helper()
	for i, row := range cover(s) {
		for j, got := range row {
			want := 0
			if maskSees(s.Mask, i, j) {
				want = 1
			}
			if got != want {
				t.Fatalf("%+v: pair (%d, %d) is in %d tiles, want %d", s, i, j, got, want)
			}
		}
	}
}

func layouts(docs []int) []Layout {
	l := []Layout{Contiguous{}, Zigzag{}, Striped{}, Window{Rows: 5}}
	if len(docs) > 0 {
		l = append(l, Document{Docs: docs}, DocumentZigzag{Docs: docs})
	}
	return l
}

// randomDocs cuts n into parts, some of one token.
func randomDocs(rng *rand.Rand, n int) []int {
	var docs []int
	for n > 0 {
		d := 1 + rng.IntN(n)
		if rng.IntN(3) == 0 {
			d = 1
		}
		docs = append(docs, d)
		n -= d
	}
	return docs
}

func TestPlanCoversEveryVisiblePairOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		s := Shape{SeqQ: 1 + rng.IntN(40), Size: 1 + rng.IntN(9)}
		s.SeqKV = s.SeqQ
		var docs []int
		switch rng.IntN(3) {
		case 0:
			docs = randomDocs(rng, s.SeqQ)
		case 1:
			s.SeqKV = 1 + rng.IntN(40)
		}
		m, err := NewMask(rng.IntN(3) > 0, rng.IntN(12)-4, s.SeqQ, s.SeqKV, docs)
		if err != nil {
			t.Fatal(err)
		}
		s.Mask = m
		for _, s.Layout = range layouts(docs) {
			checkCover(t, s)
		}
	}
}

func FuzzPlan(f *testing.F) {
	f.Add(uint8(16), uint8(16), uint8(4), int8(0), int8(-1), uint64(0))
	f.Add(uint8(33), uint8(7), uint8(3), int8(5), int8(3), uint64(9))
	f.Fuzz(func(t *testing.T, sq, sk, size uint8, hi, width int8, seed uint64) {
		s := Shape{SeqQ: int(sq%48) + 1, SeqKV: int(sk%48) + 1, Size: int(size%8) + 1}
		s.Mask.Band = Band{-Unbounded, int(hi)}
		if width >= 0 {
			s.Mask.Lo = int(hi) - int(width)
		}
		if seed%2 == 1 {
			s.SeqKV = s.SeqQ
			s.Mask.Docs = randomDocs(rand.New(rand.NewPCG(seed, 0)), s.SeqQ)
		}
		for _, s.Layout = range layouts(s.Mask.Docs) {
			checkCover(t, s)
		}
	})
}

func TestLayoutsGiveEveryPositionOnce(t *testing.T) {
	for n := range 70 {
		for size := 1; size <= 9; size++ {
			docs := randomDocs(rand.New(rand.NewPCG(uint64(n), uint64(size))), n)
			for _, l := range append(layouts(nil), Document{Docs: docs}, DocumentZigzag{Docs: docs}) {
				seen := make([]int, n)
				for r := range size {
					last := -1
					for _, p := range Positions(l.Spans(n, size, r)) {
						if p <= last {
							t.Fatalf("%s of %d over %d: rank %d stores %d after %d", l.Name(), n, size, r, p, last)
						}
						last = p
						seen[p]++
					}
				}
				for p, c := range seen {
					if c != 1 {
						t.Fatalf("%s of %d over %d: position %d is on %d ranks", l.Name(), n, size, p, c)
					}
				}
			}
		}
	}
}

func TestLocalLengthsDifferLittle(t *testing.T) {
	for _, l := range layouts(nil) {
		for n := range 200 {
			for size := 1; size <= 8; size++ {
				lo, hi := n, 0
				for r := range size {
					c := Count(l.Spans(n, size, r))
					lo, hi = min(lo, c), max(hi, c)
				}
				if hi-lo > 2 {
					t.Errorf("%s of %d over %d ranks: between %d and %d tokens a rank", l.Name(), n, size, lo, hi)
				}
			}
		}
	}
}

func causal() Mask { return Mask{Band: Band{-Unbounded, 0}} }

func TestZigzagIsOneCallAHopAndBalanced(t *testing.T) {
	for _, size := range []int{1, 2, 3, 4, 8, 16} {
		s := Shape{SeqQ: 32 * size, SeqKV: 32 * size, Size: size, Layout: Zigzag{}, Mask: causal()}
		for r := range size {
			for o := range size {
				if got := Plan(s, r, o); len(got) != 1 {
					t.Errorf("Plan(zigzag over %d, %d, %d) = %v, want one tile", size, r, o, got)
				}
			}
		}
		if b := Balance(Work(s)); b != 1 {
			t.Errorf("balance of zigzag over %d ranks = %v, want 1", size, b)
		}
	}
}

// Under a window that is not most of the sequence, ranks have equal work and as many positions, to within one. A window
// of most of it, and none, makes a zigzag.
func TestWindowIsBalanced(t *testing.T) {
	for _, n := range []int{4096, 8192, 10007, 65536} {
		for _, size := range []int{1, 2, 3, 8} {
			for _, window := range []int{0, 1, 127, 512, 1023, 2047} {
				mask, err := NewMask(true, window, n, n, nil)
				if err != nil {
					t.Fatal(err)
				}
				l := LayoutName("window").Layout(nil, mask.Band, Band{-window / 2, 0})
				s := Shape{SeqQ: n, SeqKV: n, Size: size, Layout: l, Mask: mask}
				// A rank may have a position more, and a chunk of the zigzag ends up to 2 * size positions after the window.
				if work := Work(s); slices.Max(work)-slices.Min(work) > (window+1)*2*size {
					t.Errorf("a window of %d in %d positions: the ranks work %v", window, n, work)
				}
				counts := make([]int, size)
				for r := range counts {
					counts[r] = Count(l.Spans(n, size, r))
				}
				if slices.Max(counts)-slices.Min(counts) > 1 {
					t.Errorf("a window of %d in %d positions: the ranks hold %v", window, n, counts)
				}
			}
			for name, bands := range map[string][]Band{"none": nil, "causal": {Causal()}, "long": {{-n + 2, 0}, {-3, 0}}} {
				l := LayoutName("window").Layout(nil, bands...)
				if got, want := AllSpans(l, n, size), AllSpans(Zigzag{}, n, size); !reflect.DeepEqual(got, want) {
					t.Errorf("%d positions over %d, %s: %v, want %v", n, size, name, got, want)
				}
			}
		}
	}
}

func TestPlanIsWhatOneWouldWriteByHand(t *testing.T) {
	s := Shape{SeqQ: 16, SeqKV: 16, Size: 2, Layout: Zigzag{}, Mask: causal()}
	cases := []struct {
		rank, owner int
		want        Tile
	}{
		{0, 0, Tile{Range{0, 8}, Range{0, 8}, Band{-7, 0}}}, // causal over both chunks
		{0, 1, Tile{Range{4, 8}, Range{0, 8}, Band{-7, 3}}}, // the late queries, all keys
		{1, 0, Tile{Range{0, 8}, Range{0, 4}, Band{-7, 3}}}, // all queries, the early keys
		{1, 1, Tile{Range{0, 8}, Range{0, 8}, Band{-7, 0}}},
	}
	for _, c := range cases {
		if got := Plan(s, c.rank, c.owner); !reflect.DeepEqual(got, []Tile{c.want}) {
			t.Errorf("Plan(zigzag 16 over 2, %d, %d) = %v, want %v", c.rank, c.owner, got, c.want)
		}
	}
}

func TestPairsCountsWhatTheBandShows(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		a := Tile{
			Q:    Range{rng.IntN(6), 6 + rng.IntN(6)},
			K:    Range{rng.IntN(6), 6 + rng.IntN(6)},
			Band: Band{rng.IntN(30) - 15, rng.IntN(30) - 15},
		}
		if rng.IntN(4) == 0 {
			a.Band.Lo = -Unbounded
		}
		want := 0
		for i := a.Q.Lo; i < a.Q.Hi; i++ {
			for j := a.K.Lo; j < a.K.Hi; j++ {
				if a.Band.Sees(i, j) {
					want++
				}
			}
		}
		if a.Band.Lo > a.Band.Hi {
			if _, ok := a.Trim(); ok {
				t.Fatalf("trim(%v) kept an empty band", a)
			}
			continue
		}
		if got := a.Pairs(); got != want {
			t.Fatalf("Pairs(%v) = %d, want %d", a, got, want)
		}
		b, ok := a.Trim()
		if ok != (want > 0) {
			t.Fatalf("trim(%v) = %v, %t; it has %d pairs", a, b, ok, want)
		}
		if ok && b.Pairs() != want {
			t.Fatalf("trim(%v) = %v with %d pairs, want %d", a, b, b.Pairs(), want)
		}
	}
}

func TestManyDocumentsStayLinear(t *testing.T) {
	docs := make([]int, 20000)
	n := 0
	for i := range docs {
		docs[i] = 16 + i%7
		n += docs[i]
	}
	s := Shape{SeqQ: n, SeqKV: n, Size: 4, Layout: Document{Docs: docs},
		Mask: Mask{Band: Band{-Unbounded, 0}, Docs: docs}}
	total := 0
	for o := range s.Size {
		total += len(Plan(s, 1, o))
	}
	if total > 2*4*len(docs) {
		t.Errorf("%d tiles for %d documents", total, len(docs))
	}
}

func TestNewMaskRefuses(t *testing.T) {
	for _, c := range []struct {
		sq, sk int
		docs   []int
	}{{8, 8, []int{3, 4}}, {8, 8, []int{9, -1}}, {8, 8, []int{9, 0}}, {8, 9, []int{8}}} {
		if m, err := NewMask(true, -1, c.sq, c.sk, c.docs); err == nil {
			t.Errorf("NewMask(%v) = %v, want an error", c, m)
		}
	}
}

// A window beyond any sequence is no window, also where its arithmetic would overflow.
func TestHugeWindowHidesNothing(t *testing.T) {
	for _, n := range []struct{ q, kv int }{{13, 13}, {5, 13}, {13, 5}} {
		m, err := NewMask(true, math.MaxInt, n.q, n.kv, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range layouts([]int{13}) {
			if !LayoutName(l.Name()).ByDocument() || n.q == n.kv {
				checkCover(t, Shape{SeqQ: n.q, SeqKV: n.kv, Size: 3, Layout: l, Mask: m})
			}
		}
	}
	plain, _ := NewMask(true, -1, 13, 13, nil)
	huge, _ := NewMask(true, math.MaxInt, 13, 13, nil)
	a := Plan(Shape{SeqQ: 13, SeqKV: 13, Size: 1, Layout: Contiguous{}, Mask: plain}, 0, 0)
	b := Plan(Shape{SeqQ: 13, SeqKV: 13, Size: 1, Layout: Contiguous{}, Mask: huge}, 0, 0)
	if !reflect.DeepEqual(a, b) {
		t.Errorf("with the largest window %v, without one %v", b, a)
	}
}

func BenchmarkPlan(b *testing.B) {
	for _, docs := range []int{1, 100, 1000} {
		lengths := make([]int, docs)
		for i := range lengths {
			lengths[i] = 1 << 20 / docs
		}
		n := docs * lengths[0]
		mask := causal()
		if docs > 1 {
			mask.Docs = lengths
		}
		for _, l := range layouts(lengths) {
			b.Run(fmt.Sprintf("%s/docs=%d", l.Name(), docs), func(b *testing.B) {
				s := Shape{SeqQ: n, SeqKV: n, Size: 8, Layout: l, Mask: mask}
				for b.Loop() {
					Plan(s, 3, 5)
				}
			})
		}
	}
}
