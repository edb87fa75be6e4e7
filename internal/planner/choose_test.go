package planner

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

func caseOf(tokens, ranks, perHost int, kinds ...Kind) Case {
	if len(kinds) == 0 {
		kinds = []Kind{{-1, 1}}
	}
	return Case{
		Attention: Attention{DType: tensor.BF16, Batch: 1, Heads: 32, KVHeads: 8, Dim: 128, DimV: 128},
		Tokens:    tokens, Kinds: kinds, Ranks: ranks, At: Place{PerHost: perHost},
	}
}

var flash = Asked{Backends: []string{"flash"}}

// fastLinks and slowLinks are of a device with some 500 TFLOP/s: 450 GB/s each way, and a tenth inside and
// a hundredth between hosts.
var (
	fastLinks = plain{pair: 1e-12, start: 5e-6, byte: 1 / 450e9, latency: 1e-5, copied: 1 / 3e12}
	slowLinks = plain{pair: 1e-12, start: 5e-6, byte: 1 / 450e9, latency: 1e-5, copied: 1 / 3e12, across: 1 / 1e9, perHost: 4}
)

func chosen(t testing.TB, c Case, a Asked, costs Costs) Choice {
	t.Helper()
	choice, err := Choose(c, Ways(c, a), costs)
	if err != nil {
		t.Fatal(err)
	}
	if !choice.Known {
		t.Fatal("nothing is known")
	}
	return choice
}

func TestChoiceIsTheFastestWay(t *testing.T) {
	for _, costs := range []plain{fastLinks, slowLinks} {
		for _, c := range []Case{caseOf(4096, 8, 4), caseOf(1<<16, 8, 4, Kind{-1, 1}, Kind{1024, 3}), caseOf(1<<14, 2, 2)} {
			ways := Ways(c, flash)
			choice := chosen(t, c, flash, costs)
			for k, kind := range choice.Kinds {
				s := newSimulator(c, c.Kinds[k], newCommon(costs), ExactRanks)
				best := kind.Ranked[0]
				for _, w := range ways {
					seconds, err := s.time(w)
					if err != nil {
						t.Fatal(err)
					}
					if w.Layout == best.Layout && seconds < best.Seconds*(1-Margin)-1e-15 {
						t.Errorf("%v: chose %s with %g s, %s takes %g s", c.Kinds[k], best.Way, best.Seconds, w, seconds)
					}
				}
				if best.Layout != choice.Ranked[0].Layout || len(kind.Ranked) != len(ways) {
					t.Errorf("%v: %s, %d ways, in a model of layout %s with %d", c.Kinds[k], best.Way, len(kind.Ranked), choice.Ranked[0].Layout, len(ways))
				}
			}
		}
	}
}

func TestChoiceOfALayout(t *testing.T) {
	choice := chosen(t, caseOf(1<<16, 8, 8), flash, fastLinks)
	if got := choice.Ranked[0].Layout; got != "zigzag" {
		t.Errorf("chose %s", got)
	}
	// A contiguous ring takes half as long again; trading heads, which costs transfers, saves it from that.
	if worst := choice.Ranked[1]; worst.Layout != "contiguous" || worst.Seconds < 1.05*choice.Seconds {
		t.Errorf("the worst is %+v, the best takes %g s", worst, choice.Seconds)
	}
}

// Between hosts on a slow network, trading heads inside hosts sends a quarter of the keys that a ring does.
func TestChoiceOfAnAlgorithm(t *testing.T) {
	slow := chosen(t, caseOf(1<<14, 8, 4), flash, slowLinks).Kinds[0].Ranked
	if slow[0].Algorithm != "hierarchical" || slow[0].Inner != 4 {
		t.Errorf("between hosts: %v", slow[:3])
	}
	long := chosen(t, caseOf(1<<20, 8, 8), flash, fastLinks).Kinds[0].Ranked
	if long[0].Algorithm != "ring" { // all hide their transfers, and it comes first
		t.Errorf("long sequences: %v", long[:3])
	}
}

func TestChoiceKeepsWhatWasAsked(t *testing.T) {
	c := caseOf(1<<14, 8, 4)
	for _, a := range []Asked{
		{Algorithm: "ulysses", Backends: []string{"flash"}},
		{Layout: "contiguous", Backends: []string{"flash", "fused"}},
		{Algorithm: "hierarchical", Inner: 2, Backends: []string{"flash"}},
		{Algorithm: "allgather", GatherHeads: 2, Backends: []string{"flash"}},
		{Documents: true, Layout: "document", Backends: []string{"flash"}},
	} {
		ways := Ways(c, a)
		if len(ways) == 0 {
			t.Errorf("%+v has no ways", a)
		}
		for _, w := range ways {
			if a.Algorithm != "" && w.Algorithm != a.Algorithm || a.Layout != "" && w.Layout != a.Layout ||
				a.Inner > 0 && w.Inner != a.Inner || a.GatherHeads > 0 && w.GatherHeads != a.GatherHeads || !slices.Contains(a.Backends, w.Backend) {
				t.Errorf("%+v has the way %s", a, w)
			}
		}
	}
}

func TestWaysAreOnes(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 6, 8, 16, 64} {
		for _, perHost := range []int{0, 1, 4, 8} {
			c := caseOf(1<<14, ranks, perHost)
			for i, w := range Ways(c, flash) {
				if slices.Contains(Ways(c, flash)[:i], w) {
					t.Errorf("%d ranks: %s twice", ranks, w)
				}
				s := newSimulator(c, c.Kinds[0], newCommon(fastLinks), 1)
				if x, err := s.time(w); err != nil || math.IsInf(x, 1) || x <= 0 {
					t.Errorf("%d ranks, %d a host, %s: %g, %v", ranks, perHost, w, x, err)
				}
			}
		}
	}
}

// known is costs of some backends only.
type known struct {
	plain
	speed map[string]float64
}

func (k known) Call(c Call) float64 {
	if f, ok := k.speed[c.Backend]; ok {
		return k.plain.Call(c) / f
	}
	return math.Inf(1)
}

func TestChoiceOfABackend(t *testing.T) {
	a := Asked{Backends: []string{"fused", "flash", "reference"}}
	c := caseOf(1<<14, 4, 4, Kind{-1, 1}, Kind{512, 3})
	if got := chosen(t, c, a, known{fastLinks, map[string]float64{"flash": 1.2, "fused": 1}}); got.Ranked[0].Backend != "flash" || len(got.Ranked) != 4 {
		t.Errorf("%+v", got.Ranked)
	}
	if got := chosen(t, c, a, known{fastLinks, map[string]float64{"flash": 1 + Margin/2, "fused": 1}}); got.Ranked[0].Backend != "fused" {
		t.Errorf("a difference below the margin chose %+v", got.Ranked[0])
	}
	none, err := Choose(c, Ways(c, a), known{fastLinks, nil})
	if err != nil || none.Known {
		t.Errorf("without known costs: %+v, %v", none, err)
	}
}

// All ranks ask by themselves, and must agree; nothing of an answer may follow from the order of a map.
func TestChoiceIsTheSameEveryTime(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	cache := NewCache(slowLinks, 2)
	for range 10 {
		c := caseOf(1<<14, 8, 4, Kind{-1, 2}, Kind{1024, 2})
		c.Docs = drawDocs(rng, c.Tokens, 30)
		a := Asked{Documents: true, Layout: "document", Backends: []string{"flash"}}
		first, err := Quick(c, Ways(c, a), slowLinks)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			again, err := Quick(c, Ways(c, a), slowLinks)
			kept, err2 := cache.Quick(c, Ways(c, a))
			if err != nil || err2 != nil || !reflect.DeepEqual(first, again) || !reflect.DeepEqual(first, *kept) {
				t.Fatalf("%v and %v, %v, %v", first, again, err, err2)
			}
		}
	}
	if len(cache.known) != 2 || cache.order.Len() != 2 {
		t.Errorf("a cache of 2 keeps %d", len(cache.known))
	}
}

// What is found by a few ranks is close to the best that all ranks show.
func TestQuickIsAsGood(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	worst, sum, n := 0.0, 0.0, 0
	for range 40 {
		c := caseOf(1<<14, 8, 4)
		c.Docs = drawDocs(rng, c.Tokens, 1+rng.IntN(60))
		costs := slowLinks
		costs.pair *= 0.2 + rng.Float64()
		costs.across *= rng.Float64()
		ways := Ways(c, Asked{Documents: true, Layout: "document", Backends: []string{"flash"}})
		all, err := Choose(c, ways, costs)
		quick, err2 := Quick(c, ways, costs)
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		s := newSimulator(c, c.Kinds[0], newCommon(costs), ExactRanks)
		took, err := s.time(quick.Kinds[0].Ranked[0].Way)
		if err != nil {
			t.Fatal(err)
		}
		regret := took/all.Seconds - 1
		worst, sum, n = max(worst, regret), sum+regret, n+1
	}
	t.Logf("what few ranks choose takes %.2f %% longer on average, %.1f %% at most", 100*sum/float64(n), 100*worst)
	if sum/float64(n) > 0.02 || worst > 0.15 {
		t.Errorf("%.3f on average, %.3f at most", sum/float64(n), worst)
	}
}

func drawDocs(rng *rand.Rand, tokens, n int) (docs []int) {
	for left := tokens; left > 0; {
		d := left
		if len(docs) < n-1 {
			d = min(left, 1+int(rng.ExpFloat64()*float64(tokens)/float64(n)))
		}
		docs, left = append(docs, d), left-d
	}
	return docs
}

// A layout that is first for one of its ways has only ways that are first within the same margin, not within another one.
func TestMarginsDoNotAddUp(t *testing.T) {
	within := func(margin, least float64, seconds ...float64) float64 {
		rank(seconds, margin, least, func(x float64) float64 { return x })
		return seconds[0]
	}
	for _, x := range []struct{ got, want float64 }{
		{within(0.1, math.Inf(1), 110, 101, 100), 110},
		{within(0.1, 95, 110, 101, 100), 101}, // 95 is another layout's
		{within(0.1, 80, 110, 101, 100), 100},
	} {
		if x.got != x.want {
			t.Errorf("%g is first, want %g", x.got, x.want)
		}
	}
}

func TestWayIsReadable(t *testing.T) {
	got := Way{Layout: "zigzag", Algorithm: "hierarchical", Inner: 4, Backend: "flash"}.String()
	if got != "hierarchical (inner 4), zigzag, flash" || !strings.Contains((Way{Algorithm: ring.Algorithms[1], GatherHeads: 2}).String(), "gather_heads 2") {
		t.Error(got)
	}
}

// A new packing: the choice of an algorithm for its two kinds of layers.
func BenchmarkQuick(b *testing.B) {
	for _, x := range []struct {
		name       string
		ranks, doc int
	}{{"2 ranks, 20 documents", 2, 20}, {"8 ranks, 20 documents", 8, 20}, {"8 ranks, 100 documents", 8, 100}, {"64 ranks, 100 documents", 64, 100}, {"1024 ranks, 1600 documents", 1024, 1600}} {
		b.Run(x.name, func(b *testing.B) {
			c := caseOf(8192*x.ranks, x.ranks, 8, Kind{-1, 4}, Kind{1024, 24})
			c.Docs = drawDocs(rand.New(rand.NewPCG(1, 1)), c.Tokens, x.doc)
			layout, err := partition.New("document", c.Docs, partition.Windows([]int{-1, 1024})...)
			if err != nil {
				b.Fatal(err)
			}
			c.Laid = partition.Ready(layout, c.Tokens, c.Ranks) // by the data, in any case
			ways, costs := Shortlist(Way{Layout: "document", Algorithm: "allgather", GatherHeads: 2, Backend: "flash"}), slowLinks
			costs.perHost = c.At.PerHost
			for b.Loop() {
				if _, err := Quick(c, ways, costs); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// anyWay says that layers may run by any way.
func anyWay(int, Way) bool { return true }

// Over a slow network full layers trade heads inside hosts, and a window fetches its rows at once.
func TestKindsApart(t *testing.T) {
	c := caseOf(1<<14, 8, 4, Kind{-1, 2}, Kind{256, 6})
	c.KVHeads = c.Heads
	choice := chosen(t, c, flash, slowLinks)
	all, together := choice.Best()
	own, seconds := choice.Apart(all, anyWay)
	if len(own) != 1 || seconds >= together {
		t.Fatalf("all by %s in %g s, apart %v in %g s", all, together, own, seconds)
	}
	want := 0.0
	for _, k := range choice.Kinds {
		w, ok := own[k.Window]
		if !ok {
			w = all
		} else if w != k.Ranked[0].Way || w.Layout != all.Layout || w.Backend != all.Backend {
			t.Errorf("%v runs by %s, and is fastest by %s", k.Kind, w, k.Ranked[0].Way)
		}
		want += float64(k.Layers) * k.Ranked[slices.IndexFunc(k.Ranked, func(x Timed) bool { return x.Way == w })].Seconds
	}
	if seconds != want {
		t.Errorf("%g s, want %g", seconds, want)
	}
	repeated := chosen(t, c, flash, slowLinks)
	again, _ := repeated.Apart(all, anyWay)
	if !reflect.DeepEqual(own, again) {
		t.Errorf("%v, and again %v", own, again)
	}
	one := chosen(t, caseOf(1<<14, 8, 4), flash, slowLinks)
	asked := 0
	kept, same := choice.Apart(all, func(window int, own Way) bool {
		asked++
		if own == all {
			t.Errorf("window %d by %s is asked for, as all run", window, own)
		}
		return false
	})
	if len(kept) > 0 || asked != 1 || same != choice.of(all) {
		t.Errorf("asked %d times whether %v may, and was told no; %g s, together %g", asked, kept, same, together)
	}
	if own, _ := one.Apart(one.Kinds[0].Ranked[0].Way, anyWay); len(own) > 0 {
		t.Errorf("layers of one kind are apart: %v", own)
	}
}

// Where few rows travel and a call is slow to start, one call behind the transfer is faster than two beside it; where many travel, not.
func TestChoiceOfWhenRowsTravel(t *testing.T) {
	c := caseOf(4096, 4, 4, Kind{16, 1})
	asked := Asked{Algorithm: "allgather", Backends: []string{"flash"}}
	few, many := fastLinks, fastLinks
	few.start, many.byte = 1e-3, 1e-8
	if got := chosen(t, c, asked, few).Kinds[0].Ranked[0]; got.Gather != ring.Before || !strings.Contains(got.String(), "allgather (before)") {
		t.Errorf("slow calls: %s", got)
	}
	if got := chosen(t, caseOf(1<<16, 4, 4), asked, many).Kinds[0].Ranked[0]; got.Gather != "" {
		t.Errorf("slow links: %s", got)
	}
	asked.Gather = ring.Beside
	for _, w := range Ways(c, asked) {
		if w.Gather != ring.Beside {
			t.Errorf("beside was asked for: %+v", w)
		}
	}
	asked.Gather, asked.Backends, asked.Documents = ring.Auto, []string{"fused"}, true
	for _, w := range Ways(c, asked) {
		if w.Gather == ring.Before {
			t.Errorf("cuDNN's backward pass has the rows of others in its call: %+v", w)
		}
	}
}
