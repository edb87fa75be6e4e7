package planner

import (
	"cmp"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

func workloadOf(tokens, ranks, perHost int, kinds ...LayerGroup) Workload {
	if len(kinds) == 0 {
		kinds = []LayerGroup{layersOf(-1, 1)}
	}
	return Workload{
		DType: tensor.BF16, Batch: 1, Tokens: tokens, Layers: kinds, Ranks: ranks, Topology: Topology{PerHost: perHost},
	}
}

// mixer describes layers with that many heads of queries and of keys.
func mixer(heads, kvHeads, dim, window int) hf.Mixer {
	return hf.Mixer{Heads: heads, KVHeads: kvHeads, Dim: dim, DimV: dim, Window: window}
}

func layersOf(window, count int) LayerGroup { return LayerGroup{mixer(32, 8, 128, window), count} }

var (
	anything ring.Strategy // leaves all open
	flash    = []string{"flash"}
)

// fastLinks and slowLinks are of a device with some 500 TFLOP/s: 450 GB/s each way, and a tenth inside and
// a hundredth between hosts.
var (
	fastLinks = plain{pair: 1e-12, start: 5e-6, byte: 1 / 450e9, latency: 1e-5, copied: 1 / 3e12}
	slowLinks = plain{pair: 1e-12, start: 5e-6, byte: 1 / 450e9, latency: 1e-5, copied: 1 / 3e12, across: 1 / 1e9}
)

func chosen(t testing.TB, c Workload, asked ring.Strategy, backends []string, costs Costs) []Timed {
	t.Helper()
	ranked, err := Choose(c, Strategies(c, asked, backends), costs)
	if err != nil || len(ranked) == 0 {
		t.Fatalf("%v, %v", ranked, err)
	}
	return ranked
}

func TestChoiceIsTheFastestStrategy(t *testing.T) {
	for _, costs := range []plain{fastLinks, slowLinks} {
		for _, c := range []Workload{workloadOf(4096, 8, 4), workloadOf(1<<16, 8, 4, layersOf(-1, 1), layersOf(1024, 3)), workloadOf(1<<14, 2,
			2)} {
			list := Strategies(c, anything, flash)
			ranked := chosen(t, c, anything, flash, costs)
			if len(ranked) != len(list) || !slices.IsSortedFunc(ranked[1:],
				func(a, b Timed) int { return cmp.Compare(a.Seconds, b.Seconds) }) {
				t.Errorf("%d of %d strategies are ranked: %v", len(ranked), len(list), ranked)
			}
			for _, s := range list {
				seconds := 0.0
				for _, k := range c.Layers {
					one, err := newSimulator(c, k, newCommon(costs)).time(s)
					if err != nil {
						t.Fatal(err)
					}
					seconds += float64(k.Count) * one
				}
				if best := ranked[0]; seconds < best.Seconds*(1-Margin)-1e-15 {
					t.Errorf("%v: chose %s with %g s, %s takes %g s", c.Layers, best.Strategy, best.Seconds, s, seconds)
				}
				if i := slices.IndexFunc(ranked, func(x Timed) bool { return x.Strategy == s }); i < 0 ||
					ranked[i].Seconds != seconds {
					t.Errorf("%v: %s takes %g s, ranked are %v", c.Layers, s, seconds, ranked)
				}
			}
		}
	}
}

func TestChoiceOfALayout(t *testing.T) {
	ranked := chosen(t, workloadOf(1<<16, 8, 8), anything, flash, fastLinks)
	if got := ranked[0].Layout; got != "zigzag" {
		t.Errorf("chose %s", got)
	}
	// A contiguous ring takes half as long again; exchanging heads, which costs transfers, saves it from that.
	i := slices.IndexFunc(ranked, func(x Timed) bool { return x.Layout == "contiguous" })
	if i < 0 || ranked[i].Seconds < 1.05*ranked[0].Seconds {
		t.Errorf("the best contiguous is %+v, the best takes %g s", ranked[i], ranked[0].Seconds)
	}
}

// Between hosts on a slow network, exchanging heads inside hosts sends a quarter of the keys that a ring does.
func TestChoiceOfAnAlgorithm(t *testing.T) {
	slow := chosen(t, workloadOf(1<<14, 8, 4), anything, flash, slowLinks)
	if slow[0].Algorithm != "hierarchical" || slow[0].Inner != 4 {
		t.Errorf("between hosts: %v", slow[:3])
	}
	long := chosen(t, workloadOf(1<<20, 8, 8), anything, flash, fastLinks)
	if long[0].Algorithm != "ring" { // all hide their transfers, and it comes first
		t.Errorf("long sequences: %v", long[:3])
	}
}

func TestChoiceKeepsWhatWasAsked(t *testing.T) {
	c := workloadOf(1<<14, 8, 4)
	packed := c
	packed.Docs = []int{1 << 13, 1 << 13}
	for _, x := range []struct {
		c        Workload
		asked    ring.Strategy
		backends []string
	}{
		{c, ring.Strategy{Algorithm: "ulysses"}, flash},
		{c, ring.Strategy{Layout: "contiguous"}, []string{"flash", "fused"}},
		{c, ring.Strategy{Algorithm: "hierarchical", Inner: 2}, flash},
		{c, ring.Strategy{Algorithm: "allgather", GatherHeads: 2}, flash},
		{c, ring.Strategy{Algorithm: "allgather", Gather: ring.Before}, flash},
		{packed, ring.Strategy{Layout: "document"}, flash},
	} {
		a := x.asked
		list := Strategies(x.c, a, x.backends)
		if len(list) == 0 {
			t.Errorf("%+v has no strategies", a)
		}
		for _, s := range list {
			if a.Algorithm != "" && s.Algorithm != a.Algorithm || a.Layout != "" && s.Layout != a.Layout ||
				a.Gather != "" && s.Gather != a.Gather ||
				a.Inner > 0 && s.Inner != a.Inner || a.GatherHeads > 0 && s.GatherHeads != a.GatherHeads ||
				!slices.Contains(x.backends, s.Backend) {
				t.Errorf("%+v has the strategy %s", a, s)
			}
		}
	}
}

func TestStrategiesAreOnes(t *testing.T) {
	for i, ranks := range []int{1, 2, 3, 6, 8, 16, 64} {
		for j, perHost := range []int{0, 1, 4, 8} {
			if testing.Short() && (i+j)%4 > 0 {
				continue
			}
			c := workloadOf(1<<14, ranks, perHost)
			list := Strategies(c, anything, flash)
			for i, s := range list {
				if slices.Contains(list[:i], s) {
					t.Errorf("%d ranks: %s twice", ranks, s)
				}
				sim := newSimulator(c, c.Layers[0], newCommon(fastLinks))
				if x, err := sim.time(s); err != nil || math.IsInf(x, 1) || x <= 0 {
					t.Errorf("%d ranks, %d a host, %s: %g, %v", ranks, perHost, s, x, err)
				}
			}
		}
	}
}

// known has the costs of some backends only.
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
	names := []string{"fused", "flash", "reference"}
	c := workloadOf(1<<14, 4, 4, layersOf(-1, 1), layersOf(512, 3))
	got := chosen(t, c, anything, names, known{fastLinks, map[string]float64{"flash": 1.2, "fused": 1}})
	if got[0].Backend != "flash" || slices.ContainsFunc(got, func(x Timed) bool { return x.Backend == "reference" }) {
		t.Errorf("%+v", got)
	}
	if got := chosen(t, c, anything, names[1:], known{fastLinks, map[string]float64{"reference": 1 + Margin/2,
		"flash": 1}}); got[0].Backend != "flash" {
		t.Errorf("a difference below the margin chose %+v", got[0])
	}
	if none, err := Choose(c, Strategies(c, anything, names), known{fastLinks, nil}); err != nil || len(none) > 0 {
		t.Errorf("without known costs: %+v, %v", none, err)
	}
}

// All ranks ask by themselves, and must agree; nothing of an answer may follow from the order of a map.
func TestChoiceIsTheSameEveryTime(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	turns := 10
	if testing.Short() {
		turns = 3
	}
	for range turns {
		c := workloadOf(1<<14, 8, 4, layersOf(-1, 2), layersOf(1024, 2))
		c.Docs = drawDocs(rng, c.Tokens, 30)
		asked := ring.Strategy{Layout: "document"}
		first := chosen(t, c, asked, flash, slowLinks)
		for range 2 {
			if again := chosen(t, c, asked, flash, slowLinks); !reflect.DeepEqual(first, again) {
				t.Fatalf("%v and %v", first, again)
			}
		}
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

// Where few rows travel and a call is slow to start, one call after the transfer is faster than two; where many
// travel, it is not.
func TestChoiceOfWhenRowsTravel(t *testing.T) {
	c := workloadOf(4096, 4, 4, layersOf(16, 1))
	asked := ring.Strategy{Algorithm: "allgather"}
	few, many := fastLinks, fastLinks
	few.start, many.byte = 1e-3, 1e-8
	if got := chosen(t, c, asked, flash, few)[0]; got.Gather != ring.Before {
		t.Errorf("slow calls: %s", got)
	}
	if got := chosen(t, workloadOf(1<<16, 4, 4), asked, flash, many)[0]; got.Gather != "" {
		t.Errorf("slow links: %s", got)
	}
	asked.Gather = ring.Beside
	for _, s := range Strategies(c, asked, flash) {
		if s.Gather != ring.Beside {
			t.Errorf("beside was asked for: %+v", s)
		}
	}
	c.Docs, asked.Gather = []int{2048, 2048}, ring.Auto
	for _, s := range Strategies(c, asked, []string{"fused"}) {
		if s.Gather == ring.Before {
			t.Errorf("cuDNN's backward pass has the rows of others in its call: %+v", s)
		}
	}
	for gates, want := range map[bool]string{true: ring.Before, false: ring.Auto} {
		c.DType, c.Topology.Gates = tensor.BF16, gates
		if s := Strategies(c, asked, flash)[0]; s.Gather != want {
			t.Errorf("documents by flash, gates %t: %+v", gates, s)
		}
	}
}

// Predictions within the margin decide nothing: the first strategy of the list wins. With a window in every layer, on
// GPUs ranks have equal work, and it makes one call after the transfer if no window is longer than a third of the
// rows. Above ExactRanks ranks a zigzag sends fewer messages.
func TestFirstStrategyOfWindows(t *testing.T) {
	windows := []LayerGroup{layersOf(16, 1), layersOf(64, 2)}
	before := ring.Strategy{Layout: "window", Algorithm: "allgather", Gather: ring.Before}
	zigzag, beside := before, before
	zigzag.Layout, beside.Gather = "zigzag", ""
	many := ring.Strategy{Layout: "zigzag", Algorithm: "allgather"}
	for _, x := range []struct {
		layers []LayerGroup
		ranks  int
		shared bool
		want   ring.Strategy
	}{
		{windows, 4, false, before},
		{windows, 4, true, zigzag},
		{[]LayerGroup{layersOf(16, 1), layersOf(4096/4/3, 2)}, 4, false, before},
		{[]LayerGroup{layersOf(16, 1), layersOf(4096/4/3+1, 2)}, 4, false, beside},
		{[]LayerGroup{layersOf(16, 1), layersOf(4096/4/3+1, 2)}, 4, true, zigzag},
		{windows, 2 * ExactRanks, false, many},
		{[]LayerGroup{layersOf(16, 1), layersOf(-1, 2)}, 4, false, ring.Strategy{Layout: "zigzag", Algorithm: "ring"}},
	} {
		c := workloadOf(4096, x.ranks, x.ranks, x.layers...)
		c.Topology.Shared = x.shared
		got := Strategies(c, anything, flash)[0]
		if x.want.Backend = flash[0]; got != x.want {
			t.Errorf("%+v: %+v", x, got)
		}
	}
}

// A list begins with the first element within the margin, whatever lies between.
func TestFirstWithinTheMargin(t *testing.T) {
	for _, x := range []struct {
		list []float64
		want float64
	}{{[]float64{110, 101, 100}, 110}, {[]float64{120, 101, 100}, 101}, {[]float64{95, 110, 101}, 95},
		{[]float64{130, 120, 100}, 100}} {
		First(x.list, 0.1, func(x float64) float64 { return x })
		if x.list[0] != x.want || !slices.IsSorted(x.list[1:]) || len(x.list) != 3 {
			t.Errorf("%v, want %g first", x.list, x.want)
		}
	}
}
