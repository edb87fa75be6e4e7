package planner

import (
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// plainly returns the seconds of a layer by a strategy, with nothing remembered: each index, schedule and cost is made
// anew.
func plainly(t testing.TB, c Workload, layers LayerGroup, w ring.Strategy, costs Costs) (total float64) {
	t.Helper()
	s := newSimulator(c, layers, newCommon(costs))
	x, err := s.of(w.Layout)
	if err != nil {
		t.Fatal(err)
	}
	spec := w.Spec(x.Shape, layers.Heads, layers.KVHeads)
	a := s.a
	a.Backend = w.Backend
	var list []int
	if c.Ranks > ExactRanks {
		list = s.follow(x, w)
	}
	for _, backward := range []bool{false, true} {
		g, err := newGroup(w.Algorithm, spec, partition.NewIndex(x.Shape), list)
		if err != nil {
			t.Fatal(err)
		}
		g.gated = c.Topology.gated(a.Backend, a.DType, c.Ranks)
		programs, err := g.programs(a, backward)
		if err != nil {
			t.Fatal(err)
		}
		r, err := newPrices(a, c.Topology, costs).pass(programs, g.sampled)
		if err != nil {
			t.Fatal(err)
		}
		if total += r.Seconds; !backward && c.Recompute {
			total += r.Seconds
		}
	}
	return total
}

// What strategies share and remember changes no time by a bit.
func TestTimesAreThoseOfThePlainSearch(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	turns := 12 // covers all combinations of cycles of 6, 4, 3 and 2
	if testing.Short() {
		turns = 6 // each of them is there
	}
	for n := range turns {
		ranks := []int{2, 3, 4, 8, 12, ExactRanks + 1}[n%6]
		c := workloadOf(64*ranks+rng.IntN(4096), ranks, []int{0, 2, 4}[rng.IntN(3)], layersOf(-1, 2), layersOf(1+rng.IntN(400), 3))
		c.Topology.Shared, c.Topology.Gates = n%4 == 0, n%4 == 1
		if c.Recompute = n%2 == 0; n%3 > 0 {
			c.Docs = drawDocs(rng, c.Tokens, 1+rng.IntN(60))
		}
		costs := slowLinks
		costs.queued, costs.across = rng.Float64()*1e-6, costs.across*rng.Float64()
		by := known{costs, map[string]float64{"flash": 1, "fused": 1.5}}
		common := newCommon(by)
		for _, layers := range c.Layers {
			s := newSimulator(c, layers, common)
			for i, x := range Strategies(c, anything, []string{"flash", "fused"}) {
				got, err := s.time(x)
				if err != nil {
					t.Fatal(err)
				}
				if testing.Short() && (i+n)%3 > 0 {
					continue // another turn compares it
				}
				if want := plainly(t, c, layers, x, by); got != want {
					t.Fatalf("%d ranks, documents %v, %v: %s takes %v s, by a plain search %v", ranks, c.Docs, layers, x,
						got, want)
				}
			}
		}
	}
}

// A rank alone, with peers that run the same program, ends with the ranks of a group that all run it.
func TestLoneIsOneOfAll(t *testing.T) {
	for _, algorithm := range ring.Algorithms {
		spec := specOf(t, false, -1, 64, 4, partition.Contiguous{})
		spec.Heads, spec.KVHeads, spec.Inner = 8, 4, 2
		a := one
		a.Heads, a.KVHeads = 8, 4
		c := plain{pair: 1, byte: 0.25, copied: 0.125, latency: 3}
		g, err := newGroup(algorithm, spec, partition.NewIndex(spec.Shape), []int{0, 2})
		if err != nil {
			t.Fatal(err)
		}
		for _, backward := range []bool{false, true} {
			all := run(t, algorithm, spec, a, backward, Topology{}, c)
			programs, err := g.programs(a, backward)
			if err != nil {
				t.Fatal(err)
			}
			if some, err := newPrices(a, Topology{}, c).pass(programs, true); err != nil || some.Seconds != all.Seconds {
				t.Errorf("%s, backward %t: %g seconds, %v, all together %g", algorithm, backward, some.Seconds, err,
					all.Seconds)
			}
		}
	}
}
