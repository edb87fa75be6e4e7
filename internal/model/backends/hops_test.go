package backends

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/partition"
)

func hopNames(hops []Call) []string {
	var names []string
	for _, h := range hops {
		if !slices.Contains(names, h.Hop) {
			names = append(names, h.Hop)
		}
	}
	slices.Sort(names)
	return names
}

func TestHopsAreNamedByWhatTheyAsk(t *testing.T) {
	for _, c := range []struct {
		params string
		want   []string
	}{
		{"", []string{"whole"}},
		{"cp=4", []string{"diagonal", "half keys", "half queries"}},
		{"cp=4 alg=allgather", []string{"diagonal", "half keys", "half queries"}},
		{"cp=4 alg=ulysses", []string{"whole"}},
		{"cp=4 inner=2 alg=hierarchical", []string{"diagonal", "half keys", "half queries"}},
		{"cp=4 inner=4 alg=hierarchical", []string{"whole"}},
		{"cp=4 inner=2 alg=hierarchical layout=striped", []string{"diagonal", "off-diagonal band"}},
		{"cp=4 layout=contiguous", []string{"diagonal", "full"}},
		{"cp=4 layout=striped", []string{"diagonal", "off-diagonal band"}},
		{"cp=4 mask=full", []string{"diagonal", "full"}},
		{"cp=4 docs=1", []string{"documents", "documents off the diagonal"}},
		{"cp=4 window=100 layout=contiguous", []string{"diagonal", "off-diagonal band"}},
		{"docs=1", []string{"documents"}},
	} {
		if got := hopNames(hopsFor(with(c.params))); !slices.Equal(got, c.want) {
			t.Errorf("Hops(%s) are %q, want %q", c.params, got, c.want)
		}
	}
}

func TestHopsHaveTheLengthsOfTheRanks(t *testing.T) {
	var got []string
	for _, h := range hopsFor(with("cp=3 s=1000")) {
		got = append(got, h.Hop+": "+h.String())
	}
	want := []string{ // chunks of 166, 167, 167, 166, 167, 167 tokens; rank r has r and 5-r
		"diagonal: rank 0 with the keys of rank 0: 333 queries by 333 keys, causal",
		"diagonal: rank 1 with the keys of rank 1: 334 queries by 334 keys, causal",
		"half keys: rank 1 with the keys of rank 0: 334 queries by 166 keys, full",
		"half keys: rank 2 with the keys of rank 0: 333 queries by 166 keys, full",
		"half keys: rank 2 with the keys of rank 1: 333 queries by 167 keys, full",
		"half queries: rank 0 with the keys of rank 1: 167 queries by 334 keys, full",
		"half queries: rank 0 with the keys of rank 2: 167 queries by 333 keys, full",
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("hops of 1000 tokens over 3 ranks:\n%q\nwant\n%q", got, want)
	}
}

// TestHopsLeaveNoneOut compares hopsOf with a walk over every pair of ranks, without its shortcut for many ranks.
func TestHopsLeaveNoneOut(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 300 {
		p := defaults()
		p.SeqQ, p.ContextSize = 1+rng.IntN(300), 1+rng.IntN(9)
		p.SeqKV = p.SeqQ
		if rng.IntN(3) == 0 {
			p.SeqKV = 1 + rng.IntN(300)
		}
		p.Causal = rng.IntN(2) == 0
		p.WindowLeft, p.WindowRight = rng.IntN(60)-30, rng.IntN(60)-30
		p.WindowLeft, p.WindowRight = max(p.WindowLeft, -1), max(p.WindowRight, -1)
		p.Layout = []partition.LayoutName{"zigzag", "striped", "contiguous", "window", "document"}[rng.IntN(5)]
		p, err := p.checked()
		if err != nil {
			t.Fatal(err)
		}
		type form struct {
			q, k        int
			mask        MaskKind
			left, right int
			rects       int
		}
		have := map[form]bool{}
		for _, h := range hopsOf(p) {
			have[form{h.SeqQ, h.SeqKV, h.Mask, h.Left, h.Right, h.Rects}] = true
		}
		all := 0
		s := p.shape(p.ContextSize)
		for r := range p.ContextSize {
			for o := range p.ContextSize {
				tiles := partition.Plan(s, r, o)
				for _, x := range tiles {
					c := Call{Params: p}
					c.SeqQ, c.SeqKV = x.Q.Len(), x.K.Len()
					c.setMask(x.Band.Lo-x.K.Lo+x.Q.Lo, x.Band.Hi-x.K.Lo+x.Q.Lo)
					if !have[form{c.SeqQ, c.SeqKV, c.Mask, c.Left, c.Right, len(tiles)}] {
						t.Fatalf("%+v: rank %d with owner %d: %s is in no hop", p, r, o, &c)
					}
					all++
				}
			}
		}
		if all > 0 && len(have) == 0 {
			t.Fatalf("%+v has no hops", p)
		}
	}
}

// pairs lists the visible pairs of a call, by its own mask.
func (c *Call) pairs(add func(i, j int)) {
	shift := 0
	if c.Mask == BottomRightMask {
		shift = c.SeqKV - c.SeqQ
	}
	for i := range c.SeqQ {
		for j := range c.SeqKV {
			d := j - i - shift
			if (c.Left < 0 || d >= -c.Left) && (c.Right < 0 || d <= c.Right) {
				add(c.QAt+i, c.KAt+j)
			}
		}
	}
}

// TestCutCoversEachPairOnce cuts random bands.
func TestCutCoversEachPairOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	splits := 0
	for range 4000 {
		c := Call{Rects: 1 + rng.IntN(2)}
		c.SeqQ, c.SeqKV = 1+rng.IntN(14), 1+rng.IntN(14)
		lo, hi := -rng.IntN(c.SeqQ), rng.IntN(c.SeqKV)
		// Bands are trimmed: each row and column has a pair.
		if hi+c.SeqQ < c.SeqKV || c.SeqKV-lo < c.SeqQ {
			continue
		}
		c.setMask(lo, hi)
		want := map[[2]int]int{}
		for i := range c.SeqQ {
			for j := range c.SeqKV {
				if lo <= j-i && j-i <= hi {
					want[[2]int{i, j}]++
				}
			}
		}
		got := map[[2]int]int{}
		var visit func(Call, int)
		visit = func(x Call, depth int) {
			if depth > 20 {
				t.Fatalf("splitting %s does not end", &c)
			}
			parts := x.cut()
			if len(parts) == 0 {
				x.pairs(func(i, j int) { got[[2]int{i, j}]++ })
				return
			}
			splits++
			for _, p := range parts {
				visit(p, depth+1)
			}
		}
		visit(c, 0)
		for at, n := range got {
			if n != 1 || want[at] != 1 {
				t.Fatalf("%s: pair %v is in %d parts, want %d", &c, at, n, want[at])
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%s: parts hold %d pairs, want %d", &c, len(got), len(want))
		}
	}
	if splits < 1000 {
		t.Errorf("only %d splits were tried", splits)
	}
}

func BenchmarkHops64(b *testing.B) {
	for _, params := range []string{"cp=64 s=1048576", "cp=64 s=1000001", "cp=64 s=1000001 window=4096",
		"cp=64 s=1000001 layout=striped"} {
		b.Run(params, func(b *testing.B) {
			p := with(params)
			for b.Loop() {
				hopsFor(p)
			}
		})
	}
}

// hopsFor returns the kernel calls of valid parameters.
func hopsFor(p Params) []Call {
	p, err := p.checked()
	if err != nil {
		panic(err)
	}
	return hopsOf(p)
}
