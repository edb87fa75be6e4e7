package partition_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
)

// checkDefinition compares the tiles of all pairs of ranks with the definition of the mask, pair by pair, and the other
// results of an index and of Work with the tiles.
func checkDefinition(t *testing.T, d attentiontest.Definition, l partition.Layout, size int) {
	t.Helper()
	mask, err := d.Mask()
	if err != nil {
		t.Fatalf("%+v: %v", d, err)
	}
	s := partition.Shape{SeqQ: d.SeqQ, SeqKV: d.SeqKV, Size: size, Layout: l, Mask: mask}
	x, work, prepared := partition.NewIndex(s), partition.Work(s), partition.NewIndex(s)
	prepared.Prepare()
	seen := make([]int, d.SeqQ*d.SeqKV)
	for r := range size {
		q, pairs := partition.Positions(l.Spans(d.SeqQ, size, r)), 0
		for o := range size {
			k, need := partition.Positions(l.Spans(d.SeqKV, size, o)), partition.Range{}
			for _, tile := range x.Tiles(r, o) {
				need = need.Hull(tile.K)
				pairs += tile.Pairs()
				for i := tile.Q.Lo; i < tile.Q.Hi; i++ {
					for j := tile.K.Lo; j < tile.K.Hi; j++ {
						if tile.Band.Sees(i, j) {
							seen[q[i]*d.SeqKV+k[j]]++
						}
					}
				}
			}
			if got := prepared.Needs(r, o); got != need {
				t.Fatalf("%+v, %s over %d, prepared: rank %d needs rows %v of %d, want %v", d, l.Name(), size, r, got,
					o, need)
			}
			if got := x.Needs(r, o); got != need {
				t.Fatalf("%+v, %s over %d: rank %d needs rows %v of %d, want %v", d, l.Name(), size, r, got, o, need)
			}
		}
		if work[r] != pairs {
			t.Fatalf("%+v, %s over %d: rank %d has %d pairs by Work, %d by its tiles", d, l.Name(), size, r, work[r],
				pairs)
		}
	}
	for i := range d.SeqQ {
		if got, want := s.Aligned(i), d.Aligned(i); got != want {
			t.Fatalf("%+v: query %d stands at key %d, want %d", d, i, got, want)
		}
	}
	for at, n := range seen {
		i, j := at/d.SeqKV, at%d.SeqKV
		if want := d.Sees(i, j); n > 1 || want != (n == 1) {
			t.Fatalf("%+v, %s over %d: pair (%d, %d) is in %d tiles, and the mask shows it: %t", d, l.Name(), size, i,
				j, n, want)
		}
	}
}

func layouts(d attentiontest.Definition) []partition.Layout {
	all := []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{},
		partition.Window{Rows: 7}}
	if d.Docs != nil && d.DocsKV == nil {
		all = append(all, partition.Document{Docs: d.Docs})
	}
	return all
}

func TestTilesAreTheDefinition(t *testing.T) {
	for seed := range uint64(3000) {
		d := attentiontest.RandomDefinition(seed, 24)
		if seed%100 == 0 {
			d = attentiontest.RandomDefinition(seed, 90)
		}
		all := layouts(d)
		checkDefinition(t, d, all[seed%uint64(len(all))], 1+int(seed/7%9))
	}
}

func FuzzMask(f *testing.F) {
	f.Add(uint64(1), uint8(20), uint8(3))
	f.Fuzz(func(t *testing.T, seed uint64, most, size uint8) {
		d := attentiontest.RandomDefinition(seed, int(most%40)+1)
		for _, l := range layouts(d) {
			checkDefinition(t, d, l, int(size%8)+1)
		}
	})
}

// gathered is the layout after an exchange of heads: each rank holds the positions of several ranks one after another,
// not in ascending order.
type gathered struct {
	partition.Layout
	inner int
}

func (g gathered) Spans(n, size, rank int) []partition.Span {
	var s []partition.Span
	for i := range g.inner {
		s = append(s, g.Layout.Spans(n, size*g.inner, rank*g.inner+i)...)
	}
	return s
}

func TestTilesOfPositionsThatDoNotAscend(t *testing.T) {
	for seed := range uint64(300) {
		d := attentiontest.RandomDefinition(seed, 30)
		for _, l := range layouts(d) {
			checkDefinition(t, d, gathered{l, 2 + int(seed%2)}, 1+int(seed%3))
		}
	}
}

// Masks by their names, as a reader would draw them.
func TestMasksByHand(t *testing.T) {
	must := func(m partition.Mask, err error) partition.Mask {
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	draw := func(m partition.Mask, seqQ, seqKV int) string {
		s := partition.Shape{SeqQ: seqQ, SeqKV: seqKV, Size: 1, Layout: partition.Contiguous{}, Mask: m}
		tiles := partition.Plan(s, 0, 0)
		var b strings.Builder
		for i := range seqQ {
			for j := range seqKV {
				c := "."
				for _, t := range tiles {
					if i >= t.Q.Lo && i < t.Q.Hi && j >= t.K.Lo && j < t.K.Hi && t.Band.Sees(i, j) {
						c = "x"
					}
				}
				b.WriteString(c)
			}
			b.WriteString(" ")
		}
		return strings.TrimSpace(b.String())
	}
	slice := func(q0, q1, k0, k1 int, m partition.SliceMask) partition.Slice {
		return partition.Slice{Q: partition.Range{Lo: q0, Hi: q1}, K: partition.Range{Lo: k0, Hi: k1}, Mask: m}
	}
	slices := func(seqQ, seqKV int, s ...partition.Slice) partition.Mask {
		return must(partition.SliceMaskOf(seqQ, seqKV, s))
	}
	for _, c := range []struct {
		name       string
		mask       partition.Mask
		seqQ, seqK int
		want       string
	}{
		{"causal, bottom right", must(partition.Diagonal{Causal: true, Left: -1, Right: -1}.Mask(2, 4, nil, nil)), 2, 4,
			"xxx. xxxx"},
		{"causal, top left", must(partition.Diagonal{Causal: true, TopLeft: true, Left: -1, Right: -1}.Mask(2, 4, nil,
			nil)), 2, 4, "x... xx.."},
		{"top left, more queries", must(partition.Diagonal{Causal: true, TopLeft: true, Left: 1, Right: -1}.Mask(4, 2,
			nil, nil)), 4, 2, "x. xx .x .."},
		{"two sides", must(partition.Diagonal{Left: 1, Right: 0}.Mask(3, 3, nil, nil)), 3, 3, "x.. xx. .xx"},
		{"two sides, aligned", must(partition.Diagonal{Left: 0, Right: 1}.Mask(2, 4, nil, nil)), 2, 4, "..xx ...x"},
		{"causal wins", must(partition.Diagonal{Causal: true, Left: 1, Right: 5}.Mask(3, 3, nil, nil)), 3, 3,
			"x.. xx. .xx"},
		{"lengths in keys", must(partition.Diagonal{Causal: true, Left: -1, Right: -1}.Mask(4, 5, []int{2, 0, 2},
			[]int{3, 1, 1})), 4, 5, "xx... xxx.. ..... ....x"},
		{"nothing", must(partition.Diagonal{Left: -1, Right: -1}.Mask(2, 2, []int{2, 0}, []int{0, 2})), 2, 2, ".. .."},
		{"prefix", slices(4, 4, slice(0, 4, 0, 2, partition.SliceFull), slice(2, 4, 2, 4, partition.SliceCausal)), 4, 4,
			"xx.. xx.. xxx. xxxx"},
		{"overlap", slices(3, 3, slice(0, 3, 0, 3, partition.SliceCausal), slice(0, 2, 0, 2, partition.SliceFull),
			slice(0, 3, 0, 1, partition.SliceFull)), 3, 3, "xx. xx. xxx"},
		{"inverse", slices(2, 3, slice(0, 2, 0, 3, partition.SliceInvCausal)), 2, 3, "xxx .xx"},
		{"both", slices(2, 3, slice(0, 2, 0, 3, partition.SliceBiCausal)), 2, 3, "xx. .xx"},
		{"both, of fewer keys", slices(3, 2, slice(0, 3, 0, 2, partition.SliceBiCausal)), 3, 2, ".. .. .."},
	} {
		if got := draw(c.mask, c.seqQ, c.seqK); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestMasksThatAreRefused(t *testing.T) {
	for _, c := range []struct {
		docs, docsKV []int
		want         string
	}{
		{[]int{4, 4}, []int{5}, "2 in queries, 1 in keys"},
		{[]int{4, 5}, []int{5, 4}, "in queries: documents"},
		{[]int{4, 4}, []int{5, 3}, "in keys: documents hold 8 tokens"},
		{[]int{8}, []int{-1, 10}, "1 in queries, 2 in keys"},
		{[]int{9, -1}, []int{9, 0}, "in queries"},
		{[]int{8, 0}, []int{10, -1}, "in keys"},
		{nil, []int{9}, "0 in queries, 1 in keys"},
		{[]int{8}, nil, "as many queries (8) as keys (9)"},
	} {
		if m, err := (partition.Diagonal{Left: -1, Right: -1}).Mask(8, 9, c.docs, c.docsKV); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("documents %v, %v: mask %+v, %v; want %q", c.docs, c.docsKV, m, err, c.want)
		}
	}
	for _, s := range []partition.Slice{
		{Q: partition.Range{Lo: -1, Hi: 2}}, {Q: partition.Range{Lo: 3, Hi: 2}}, {Q: partition.Range{Lo: 0, Hi: 9}},
		{K: partition.Range{Lo: -1, Hi: 2}}, {K: partition.Range{Lo: 3, Hi: 2}}, {K: partition.Range{Lo: 0, Hi: 10}},
	} {
		if m, err := partition.SliceMaskOf(8, 9, []partition.Slice{{}, s}); err == nil ||
			!strings.Contains(err.Error(), "slice 1") {
			t.Errorf("slice %+v: mask %+v, %v", s, m, err)
		}
	}
	if _, err := partition.ParseSliceMask("Causal"); err == nil ||
		!strings.Contains(err.Error(), "full, causal, inv_causal, bi_causal") {
		t.Errorf("a mask of another name: %v", err)
	}
}

// Slices that were made to cost much are refused, and many that overlap little are not.
func TestManySlices(t *testing.T) {
	const n = 1 << 14
	var dense, documents []partition.Slice
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range n {
		a, b := rng.IntN(n), rng.IntN(n)
		dense = append(dense, partition.Slice{
			Q: partition.Range{Lo: min(a, b), Hi: n - min(a, b)/2}, K: partition.Range{Lo: a, Hi: a + 1},
			Mask: partition.SliceMask(i % 4),
		}, partition.Slice{Q: partition.Range{Lo: i, Hi: n}, K: partition.Range{Lo: i, Hi: n},
			Mask: partition.SliceBiCausal})
		documents = append(documents,
			partition.Slice{Q: partition.Range{Lo: i, Hi: i + 1}, K: partition.Range{Lo: i, Hi: i + 1},
				Mask: partition.SliceCausal},
			partition.Slice{Q: partition.Range{Lo: i, Hi: i + 1}, K: partition.Range{Lo: 0, Hi: min(i, 5)}})
	}
	for i := range dense {
		dense[i].Q.Hi = max(dense[i].Q.Hi, dense[i].Q.Lo)
	}
	if _, err := partition.SliceMaskOf(n, n, dense); !errors.Is(err, partition.ErrOverlap) {
		t.Errorf("slices that all overlap: %v", err)
	}
	apart := make([]partition.Slice, 1<<18+1)
	for i := range apart {
		apart[i] = partition.Slice{Q: partition.Range{Lo: i, Hi: i + 1}, K: partition.Range{Lo: i, Hi: i + 1}}
	}
	if _, err := partition.SliceMaskOf(len(apart), len(apart), apart); !errors.Is(err, partition.ErrOverlap) {
		t.Errorf("more slices than a mask may have pieces: %v", err)
	}
	if _, err := partition.SliceMaskOf(len(apart), len(apart), apart[1:]); err != nil {
		t.Errorf("as many slices as a mask may have pieces: %v", err)
	}
	m, err := partition.SliceMaskOf(n, n, documents)
	if err != nil {
		t.Fatal(err)
	}
	work := partition.Work(partition.Shape{SeqQ: n, SeqKV: n, Size: 1, Layout: partition.Contiguous{}, Mask: m})
	if want := n + 5*n - 15; work[0] != want {
		t.Errorf("%d pairs, want %d", work[0], want)
	}
}

func TestKeysTellSlicesApart(t *testing.T) {
	seen := map[string]int{}
	for i := range 7 {
		x := [6]int{1, 5, 2, 6, -3, 4}
		if i < 6 {
			x[i]++
		}
		tile := partition.Tile{Q: partition.Range{Lo: x[0], Hi: x[1]}, K: partition.Range{Lo: x[2], Hi: x[3]},
			Band: partition.Band{Lo: x[4], Hi: x[5]}}
		for n := range 3 {
			s := partition.Shape{SeqQ: 9, SeqKV: 9, Size: 2, Layout: partition.Zigzag{}}
			for range n {
				s.Mask.Slices = append(s.Mask.Slices, tile)
			}
			key := s.Key()
			if again := s.Key(); again != key {
				t.Error("a shape has two keys")
			}
			seen[key]++
		}
	}
	for _, stand := range []partition.Stand{{End: 9}, {End: 8}, {End: 9, Ahead: 1}} {
		s := partition.Shape{SeqQ: 9, SeqKV: 9, Size: 2, Layout: partition.Zigzag{},
			Mask: partition.Mask{Stands: []partition.Stand{stand}}}
		seen[s.Key()]++
	}
	if len(seen) != 18 { // seven tiles once and twice, no tile, and three alignments
		t.Errorf("%d keys of 18 shapes", len(seen))
	}
}

func BenchmarkSlices(b *testing.B) {
	for _, docs := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprintf("docs=%d", docs), func(b *testing.B) {
			lengths, keys := make([]int, docs), make([]int, docs)
			for i := range lengths {
				lengths[i], keys[i] = 100, 200
			}
			m, err := partition.Diagonal{Causal: true, Left: -1, Right: -1}.Mask(100*docs, 200*docs, lengths, keys)
			if err != nil {
				b.Fatal(err)
			}
			s := partition.Shape{SeqQ: 100 * docs, SeqKV: 200 * docs, Size: 8, Layout: partition.Zigzag{}, Mask: m}
			for b.Loop() {
				x := partition.NewIndex(s)
				for o := range 8 {
					x.Tiles(3, o)
				}
			}
		})
	}
}
