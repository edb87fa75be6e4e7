package partition

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

// longTail returns documents of a sequence of n tokens: most are short and a few long, as in corpora; the longest has
// half of it.
func longTail(rng *rand.Rand, n int) []int {
	var docs []int
	for left := n; left > 0; left -= docs[len(docs)-1] {
		docs = append(docs, min(left, max(1, n/2), max(1, int(50*math.Pow(rng.Float64(), -1.2)))))
	}
	return docs
}

// packings returns difficult lengths of documents, of n tokens each.
func packings(rng *rand.Rand, n int) map[string][]int {
	alike := func(length int) []int { return append(slices.Repeat([]int{length}, n/length), rest(n%length)...) }
	return map[string][]int{
		"one": {n}, "two": {n / 3, n - n/3}, "alike": alike(3000), "short": alike(7), "chunks": alike(ChunkRows),
		"a chunk and one": alike(ChunkRows + 1),
		"long tail":       longTail(rng, n), "one long": append(slices.Repeat([]int{8}, n/16), n-n/16*8),
		"random": randomDocs(rng, n),
	}
}

func rest(n int) []int {
	if n == 0 {
		return nil
	}
	return []int{n}
}

func documentShape(docs []int, size int, m Mask) Shape {
	n := 0
	for _, d := range docs {
		n += d
	}
	m.Docs = docs
	return Shape{SeqQ: n, SeqKV: n, Size: size, Layout: Document{Docs: docs, Bands: []Band{m.Band}}, Mask: m}
}

// Whatever the documents are, ranks hold equally many positions, to within one, and each position is
// on one rank.
func TestDocumentsAreDealtOutEvenly(t *testing.T) {
	rng := rand.New(rand.NewPCG(51, 52))
	for i := range 300 {
		n, size := 1+rng.IntN(4000), 1+rng.IntN(12)
		docs := randomDocs(rng, n)
		if i%2 == 0 {
			docs = longTail(rng, n)
		}
		seen := make([]bool, n)
		least, most := n, 0
		for _, spans := range AllSpans(Document{Docs: docs}, n, size) {
			least, most = min(least, Count(spans)), max(most, Count(spans))
			for _, p := range Positions(spans) {
				if seen[p] {
					t.Fatalf("%v over %d: position %d is on two ranks", docs, size, p)
				}
				seen[p] = true
			}
		}
		if most-least > 1 {
			t.Errorf("%v over %d: ranks hold between %d and %d positions", docs, size, least, most)
		}
		if p := slices.Index(seen, false); p >= 0 {
			t.Errorf("%v over %d: position %d is on no rank", docs, size, p)
		}
	}
}

// The slowest rank has little more work than the mean, where no chunk is most of it: under every
// mask, and whatever the lengths.
func TestDocumentsAreBalanced(t *testing.T) {
	rng := rand.New(rand.NewPCG(53, 54))
	worst := 0.0
	for _, band := range []Band{Causal(), Full(), {-1000, 0}, {-3000, 200}} {
		for _, size := range []int{2, 3, 4, 8, 16} {
			for name, docs := range packings(rng, 4096*size) {
				s := documentShape(docs, size, Mask{Band: band})
				over := 1 / Balance(Work(s))
				worst = max(worst, over)
				if over > 1.07 {
					t.Errorf("%s over %d ranks, band %v: the slowest has %.4f of the mean", name, size, band, over)
				}
			}
		}
	}
	t.Logf("the slowest rank has at most %.4f of the mean", worst)
}

// Equal layouts return equal spans on every rank, from Spans and AllSpans. A shape whose layout balances other masks
// has another key.
func TestDealingIsAFunctionOfTheLengths(t *testing.T) {
	rng := rand.New(rand.NewPCG(55, 56))
	for range 20 {
		docs := longTail(rng, 30000)
		l := Document{Docs: docs}
		all := AllSpans(l, 30000, 6)
		for r := range all {
			if got := (Document{Docs: slices.Clone(docs)}).Spans(30000, 6, r); !reflect.DeepEqual(got, all[r]) {
				t.Fatalf("rank %d: %v, and of all ranks %v", r, got, all[r])
			}
		}
	}
	lengths := longTail(rng, 5000)
	plain := documentShape(lengths, 4, Mask{Band: Causal()})
	dealt := plain
	dealt.Layout = Ready(plain.Layout, 5000, 4)
	if dealt.Key() != plain.Key() || dealt.Layout.Name() != "document" {
		t.Error("a layout that has its answers is another")
	}
	for _, size := range []int{4, 3} {
		if got, want := AllSpans(dealt.Layout, 5000, size),
			AllSpans(plain.Layout, 5000, size); !reflect.DeepEqual(got, want) {
			t.Errorf("over %d ranks a layout that has its answers gives %v, want %v", size, got, want)
		}
	}
	a, b := documentShape([]int{5, 7}, 2, Mask{Band: Causal()}), documentShape([]int{5, 7}, 2, Mask{Band: Causal()})
	b.Layout = Document{Docs: []int{5, 7}, Bands: []Band{{-3, 0}}}
	if a.Key() == b.Key() {
		t.Error("layouts for two masks have one key")
	}
}

// Documents up to a chunk stay on one rank, except the few that fill the ranks up, so that hardly any of their keys
// travel. A long document is spread over all ranks.
func TestShortDocumentsStayWhole(t *testing.T) {
	const size = 8
	rng := rand.New(rand.NewPCG(57, 58))
	docs := []int{16384}
	for n := 16384; n < 65536; n += docs[len(docs)-1] {
		docs = append(docs, min(65536-n, 1+rng.IntN(ChunkRows)))
	}
	cut, at := 0, 0
	all := AllSpans(Document{Docs: docs}, 65536, size)
	for i, n := range docs {
		holders := 0
		for _, spans := range all {
			if slices.ContainsFunc(spans, func(s Span) bool { return s.Start < at+n && at < s.end() }) {
				holders++
			}
		}
		if i == 0 && holders != size {
			t.Errorf("the long document is on %d ranks", holders)
		}
		if i > 0 && holders > 1 {
			cut++
		}
		at += n
	}
	if cut >= size {
		t.Errorf("%d of %d short documents are cut, want fewer than ranks", cut, len(docs)-1)
	}
}

// Each rank needs exactly the rows that its tiles read. The ranges are in order, with gaps between them.
func TestNeedRangesAreWhatIsRead(t *testing.T) {
	rng := rand.New(rand.NewPCG(59, 60))
	scattered := 0
	for range 100 {
		s, all := randomShape(rng, 60)
		for _, s.Layout = range all {
			x := NewIndex(s)
			for r := range s.Size {
				for o := range s.Size {
					read := make([]bool, x.Keys(o))
					for _, tile := range slowTiles(s, r, o) {
						for i := tile.Q.Lo; i < tile.Q.Hi; i++ {
							for j := tile.K.Lo; j < tile.K.Hi; j++ {
								read[j] = read[j] || tile.Band.Sees(i, j)
							}
						}
					}
					last := -1
					got := x.NeedRanges(nil, r, o)
					for _, g := range got {
						if g.Lo <= last || g.Len() < 1 {
							t.Fatalf("%+v: %d needs %v of %d", s, r, got, o)
						}
						for j := g.Lo; j < g.Hi; j++ {
							if !read[j] {
								t.Fatalf("%+v: %d does not read row %d of %d, and needs %v", s, r, j, o, got)
							}
							read[j] = false
						}
						last = g.Hi
					}
					if j := slices.Index(read, true); j >= 0 {
						t.Fatalf("%+v: %d reads row %d of %d, and needs %v", s, r, j, o, got)
					}
					if len(got) > 1 {
						scattered++
					}
				}
			}
		}
	}
	if scattered == 0 {
		t.Error("nothing was scattered")
	}
}

// What a rank gathers is each row that its queries see, once, in the order of the sequence, and the tiles on
// it show each query the keys that the mask shows it, once.
func TestGatherIsWhatIsRead(t *testing.T) {
	rng := rand.New(rand.NewPCG(63, 64))
	shapes := 100
	if testing.Short() {
		shapes /= 3
	}
	for range shapes {
		s, all := randomShape(rng, 60)
		for _, s.Layout = range all {
			x := NewIndex(s)
			for r := range s.Size {
				g := x.Gather(r)
				at := make([]int, 0, g.Rows) // positions
				for _, run := range g.Runs {
					owned := Positions(s.Layout.Spans(s.SeqKV, s.Size, run.Owner))
					if run.At != len(at) || run.Rows.Len() < 1 || owned[run.Rows.Lo] != run.Start {
						t.Fatalf("%+v: %d gathers %+v", s, r, g.Runs)
					}
					at = append(at, owned[run.Rows.Lo:run.Rows.Hi]...)
				}
				got, want := map[[2]int]int{}, map[[2]int]int{}
				queries := Positions(s.Layout.Spans(s.SeqQ, s.Size, r))
				for _, tile := range g.Tiles {
					for i := tile.Q.Lo; i < tile.Q.Hi; i++ {
						for j := tile.K.Lo; j < tile.K.Hi; j++ {
							if tile.Band.Sees(i, j) {
								got[[2]int{queries[i], at[j]}]++
							}
						}
					}
				}
				for owner := range s.Size {
					keys := Positions(s.Layout.Spans(s.SeqKV, s.Size, owner))
					for _, tile := range slowTiles(s, r, owner) {
						for i := tile.Q.Lo; i < tile.Q.Hi; i++ {
							for j := tile.K.Lo; j < tile.K.Hi; j++ {
								if tile.Band.Sees(i, j) {
									want[[2]int{queries[i], keys[j]}]++
								}
							}
						}
					}
				}
				if !maps.Equal(got, want) || g.Rows != len(at) {
					t.Fatalf("%+v: rank %d gathers %+v and computes %v, want %v", s, r, g, got, want)
				}
			}
		}
	}
}

// The layout of a new packing of 100 documents, as every rank works it out before a batch.
func BenchmarkDispatch(b *testing.B) {
	for _, ranks := range []int{8, 64} {
		docs := longTail(rand.New(rand.NewPCG(61, 62)), 8192*ranks)
		for len(docs) > 100 { // the last ones together, until there are 100
			docs[len(docs)-2] += docs[len(docs)-1]
			docs = docs[:len(docs)-1]
			if len(docs)%7 == 0 {
				slices.Sort(docs)
				slices.Reverse(docs)
			}
		}
		b.Run(fmt.Sprintf("docs=%d/ranks=%d", len(docs), ranks), func(b *testing.B) {
			for b.Loop() {
				AllSpans(Document{Docs: docs}, 8192*ranks, ranks)
			}
		})
	}
}
