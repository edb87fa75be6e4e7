package planner

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// plainly is the seconds of a layer by a way, with nothing remembered: each schedule, each program and each cost is made anew.
func plainly(t testing.TB, c Case, kind Kind, w Way, costs Costs) (total float64) {
	t.Helper()
	s := newSimulator(c, kind, newCommon(costs), 1)
	shape, err := s.shape(w.Layout)
	if err != nil {
		t.Fatal(err)
	}
	spec := ring.Spec{Shape: shape, Heads: c.Heads, KVHeads: c.KVHeads, Inner: w.Inner, GatherHeads: w.GatherHeads, Gather: w.Gather}
	a := c.Attention
	a.Backend = w.Backend
	if c.At.Shared {
		for _, backward := range []bool{false, true} {
			r, err := Pass(schedulesOf(t, w.Algorithm, spec), c.Ranks, a, backward, c.At, costs)
			if err != nil {
				t.Fatal(err)
			}
			if total += r.Seconds; !backward && c.Recompute {
				total += r.Seconds
			}
		}
		return total
	}
	traders := ring.Traders(w.Algorithm, c.Ranks, w.Inner)
	work := partition.WorkOfHeads(partition.Work(shape), traders, c.Heads)
	most := 0
	for r := range work {
		if work[r] >= work[most] {
			most = r
		}
	}
	follow := append([]int{most}, s.busiest(w.Layout)...)
	if edge := c.At.edge(c.Ranks); edge > 0 {
		follow = append(follow, edge-1, edge)
	}
	for _, backward := range []bool{false, true} {
		slowest := 0.0
		for _, r := range follow {
			x, err := ring.New(w.Algorithm, spec, r)
			if err != nil {
				t.Fatal(err)
			}
			k := newCompiler(a, backward, c.At, costs)
			slowest = max(slowest, mirrored(k.compile(x)))
		}
		if total += slowest; !backward && c.Recompute {
			total += slowest
		}
	}
	return total
}

// mirrored runs a program in a world of two: its peers all stand for one that does what it does.
func mirrored(p *program) float64 {
	w := newWorld([]*program{p}, false)
	r := &w.ranks[0]
	for ; r.at < len(r.steps); r.at++ {
		s := &r.steps[r.at]
		if w.step(r); s.kind == begin {
			for i, m := range r.exchanges[s.exchange] {
				l := r.spots[s.exchange][i].lane
				if m.sends {
					l.received = append(l.received, l.sent[len(l.sent)-1])
				} else {
					l.sent = append(l.sent, l.received[len(l.received)-1])
				}
			}
		}
	}
	return r.end().End
}

// What is shared and remembered changes no choice, and no time by a bit.
func TestQuickIsThePlainSearch(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	turns := 12 // those of 6, 4, 3 and 2 meet in all ways in which they do
	if testing.Short() {
		turns = 6 // each of them is there
	}
	for n := range turns {
		ranks := []int{2, 3, 4, 8, 12, fewRanks + 1}[n%6]
		c := caseOf(64*ranks+rng.IntN(4096), ranks, []int{0, 2, 4}[rng.IntN(3)], Kind{-1, 2}, Kind{1 + rng.IntN(400), 3})
		c.At.Shared = n%4 == 0 && ranks <= fewRanks
		if c.Recompute = n%2 == 0; n%3 > 0 {
			c.Docs = drawDocs(rng, c.Tokens, 1+rng.IntN(60))
		}
		costs := slowLinks
		costs.queued, costs.across, costs.perHost = rng.Float64()*1e-6, costs.across*rng.Float64(), c.At.PerHost
		ways := Ways(c, Asked{Documents: len(c.Docs) > 0, Backends: []string{"flash", "fused"}})
		quick, err := Quick(c, ways, known{costs, map[string]float64{"flash": 1, "fused": 1.5}})
		if err != nil {
			t.Fatal(err)
		}
		for k, kind := range quick.Kinds {
			least := kind.Ranked[0].Seconds
			for _, x := range kind.Ranked {
				if want := plainly(t, c, c.Kinds[k], x.Way, known{costs, map[string]float64{"flash": 1, "fused": 1.5}}); x.Seconds != want {
					t.Fatalf("%d ranks, documents %v, %v: %s takes %v s, by a plain search %v", ranks, c.Docs, c.Kinds[k], x.Way, x.Seconds, want)
				}
				if m := quick.Ranked[0]; x.Layout == m.Layout && x.Backend == m.Backend {
					least = min(least, x.Seconds)
				}
			}
			if kind.Ranked[0].Seconds*(1-c.At.Margin()) > least || len(kind.Ranked) != len(ways) {
				t.Errorf("chose %+v of %d ways, the least takes %v s", kind.Ranked[0], len(kind.Ranked), least)
			}
		}
	}
}

// A rank whose peers do as it does ends as all do where all do the same.
func TestLoneIsOneOfAll(t *testing.T) {
	for _, algorithm := range ring.Algorithms {
		spec := specOf(t, false, -1, 64, 4, partition.Contiguous{})
		spec.Heads, spec.KVHeads, spec.Inner = 8, 4, 2
		a := one
		a.Heads, a.KVHeads = 8, 4
		s, c := schedulesOf(t, algorithm, spec), plain{pair: 1, byte: 0.25, copied: 0.125, latency: 3}
		for _, backward := range []bool{false, true} {
			all, err := Pass(s, 4, a, backward, Place{}, c)
			if err != nil {
				t.Fatal(err)
			}
			k := newCompiler(a, backward, Place{}, c)
			k.reuse = true
			some := k.sampled(s, []int{0, 2}, true)
			if some.Seconds != all.Seconds || len(some.Spans) == 0 || slices.ContainsFunc(some.Spans, func(x Span) bool { return x.For >= 0 }) {
				t.Errorf("%s, backward %t: %g seconds, all together %g", algorithm, backward, some.Seconds, all.Seconds)
			}
		}
	}
}
