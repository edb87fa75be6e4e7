package planner

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// plain has costs that are easy to add up by hand.
type plain struct {
	pair, start    float64 // of a call: seconds a pair and head of queries, and its start
	byte, latency  float64 // of a message within a host
	across         float64 // seconds a byte to another host, if not 0
	copied, queued float64 // of a byte, and of a call
}

func (p plain) Call(c Call) float64 {
	return p.start + p.pair*float64(partition.Pairs(c.Tiles)*c.Heads*c.Batch)
}

func (p plain) Exchange(across bool, bytes int64, _ int) float64 {
	b := p.byte
	if p.across > 0 && across {
		b = p.across
	}
	return p.latency + b*float64(bytes)
}

func (p plain) Copy(bytes int64) float64 { return p.copied * float64(bytes) }
func (p plain) Host(calls int) float64   { return p.queued * float64(calls) }

func specOf(t testing.TB, causal bool, window, tokens, ranks int, layout partition.Layout, docs ...int) ring.Spec {
	t.Helper()
	mask, err := partition.NewMask(causal, window, tokens, tokens, docs)
	if err != nil {
		t.Fatal(err)
	}
	return ring.Spec{Shape: partition.Shape{SeqQ: tokens, SeqKV: tokens, Size: ranks, Layout: layout, Mask: mask},
		Heads: 1, KVHeads: 1, Inner: 1}
}

// run returns one of the passes.
func run(t testing.TB, algorithm string, s ring.Spec, a Attention, backward bool, on Topology, c Costs) Result {
	t.Helper()
	forward, r, err := Passes(algorithm, s, a, on, c)
	if err != nil {
		t.Fatal(err)
	}
	if !backward {
		r = forward
	}
	return r
}

var one = Attention{Backend: "flash", DType: tensor.F32, Batch: 1, Mixer: mixer(1, 1, 1, -1)}

// Each rank has two rows, so a block of keys and values is 16 bytes: half a second a byte makes 8 seconds. A block
// of 4 pairs takes 4 seconds, and one on the diagonal of a causal mask 3.
func TestByHand(t *testing.T) {
	slow, fast := plain{pair: 1, byte: 0.5}, plain{pair: 1, byte: 0.125}
	two, causal := specOf(t, false, -1, 4, 2, partition.Contiguous{}), specOf(t, true, -1, 4, 2, partition.Contiguous{})
	three, full3 := specOf(t, true, -1, 6, 3, partition.Contiguous{}), specOf(t, false, -1, 6, 3,
		partition.Contiguous{})
	for _, c := range []struct {
		name      string
		algorithm string
		s         ring.Spec
		backward  bool
		costs     plain
		ends      []float64 // of each rank
		exposed   []float64
	}{
		// Hop 0: 4 beside 8. Hop 1: 4.
		{"two, full, slow link", "ring", two, false, slow, []float64{12, 12}, []float64{4, 4}},
		{"two, full, fast link", "ring", two, false, fast, []float64{8, 8}, []float64{0, 0}},
		// Rank 0 sees 3 pairs, and its block is on its way until 8. Rank 1 then sees 4 more.
		{"two, causal", "ring", causal, false, slow, []float64{8, 12}, []float64{5, 5}},
		// Block 0 reaches rank 1 at 8 and rank 2 at 16; block 1 reaches rank 2 at 8.
		{"three, causal", "ring", three, false, slow, []float64{8, 16, 20}, []float64{5, 9, 9}},
		// A rank's link carries two blocks one after another, by 16; then 8 pairs.
		{"three, all-gather", "allgather", full3, false, slow, []float64{24, 24, 24}, []float64{12, 12, 12}},
		// Gradients of 16 bytes go home after the last call: 8, 12, then 20; folding them moves 48 bytes.
		{"two, full, backward", "ring", two, true, plain{pair: 1, byte: 0.5, copied: 0.125}, []float64{26, 26},
			[]float64{12, 12}},
		// The host takes 3 seconds each for two calls and an exchange, longer than the device.
		{"two, full, slow host", "ring", two, false, plain{pair: 1, byte: 0.125, queued: 3}, []float64{9, 9},
			[]float64{0, 0}},
	} {
		r := run(t, c.algorithm, c.s, one, c.backward, Topology{}, c.costs)
		for i, x := range r.Ranks {
			if x.End != c.ends[i] || x.Exposed != c.exposed[i] {
				t.Errorf("%s: rank %d ends at %g with %g exposed, want %g and %g", c.name, i, x.End, x.Exposed,
					c.ends[i], c.exposed[i])
			}
		}
		if r.Seconds != slices.Max(c.ends) {
			t.Errorf("%s: %g seconds, want %g", c.name, r.Seconds, slices.Max(c.ends))
		}
	}
}

// With the rows of others before its only call, an all-gather has a hop without a call. A rank copies its own rows for
// it, 16 bytes read and 16 written, while 16 travel for 8 seconds; then come 8 pairs.
func TestHopOfTransfersAndCopies(t *testing.T) {
	s := specOf(t, false, -1, 4, 2, partition.Contiguous{})
	s.Gather = ring.Before
	for _, c := range []struct{ copied, copies, exposed, end float64 }{{0, 0, 8, 16}, {0.125, 4, 4, 16},
		{0.5, 16, 0, 24}} {
		r := run(t, "allgather", s, one, false, Topology{}, plain{pair: 1, byte: 0.5, copied: c.copied}).Ranks[0]
		if r.Copies != c.copies || r.Exposed != c.exposed || r.End != c.end {
			t.Errorf("%g seconds a byte: %+v, want %+v", c.copied, r, c)
		}
	}
}

// Ranks of 3 and 7 pairs on shared cores take 5 each.
// With gates a call of 8 pairs, 8 seconds, runs beside the transfer of 8 bytes and ends no earlier.
func TestCallsThatWaitForRows(t *testing.T) {
	s := specOf(t, false, -1, 4, 2, partition.Contiguous{})
	s.Gather = ring.Before
	half := one
	half.DType = tensor.BF16
	fused := half
	fused.Backend = "fused"
	for _, c := range []struct {
		name         string
		a            Attention
		on           Topology
		byte         float64
		end, exposed float64
	}{
		{"no gates", half, Topology{}, 0.5, 12, 4},
		{"gates", half, Topology{Gates: true}, 0.5, 8, 0},
		{"gates and a slow link", half, Topology{Gates: true}, 2, 16, 8},
		{"two hosts", half, Topology{Gates: true, PerHost: 1}, 0.5, 12, 4},
		{"another backend", fused, Topology{Gates: true}, 0.5, 12, 4},
		{"float32, 16 bytes", one, Topology{Gates: true}, 0.5, 16, 8},
	} {
		r := run(t, "allgather", s, c.a, false, c.on, plain{pair: 1, byte: c.byte})
		for _, x := range r.Ranks {
			if x.End != c.end || x.Exposed != c.exposed || x.Compute != 8 {
				t.Errorf("%s: %+v, want an end at %g, of which %g exposed", c.name, x, c.end, c.exposed)
			}
		}
	}
}

func TestSharedCores(t *testing.T) {
	r := run(t, "ring", specOf(t, true, -1, 4, 2, partition.Contiguous{}), one, false, Topology{Shared: true},
		plain{pair: 1})
	if math.Abs(r.Seconds-5) > 1e-12 || math.Abs(r.Ranks[1].Compute-5) > 1e-12 {
		t.Errorf("%+v", r)
	}
}

// Four ranks are pinned to two cores. The ranks with 3 and 7 pairs share one, and the ranks with 11 and 15 pairs the
// other. With a core each they share none.
func TestRanksThatKeepToCores(t *testing.T) {
	s := specOf(t, true, -1, 8, 4, partition.Contiguous{})
	for _, x := range []struct {
		at   Topology
		want []float64
	}{
		{Topology{Shared: true, PerHost: 4, Cores: 2}, []float64{5, 5, 13, 13}},
		{Topology{Shared: true, PerHost: 4, Cores: 3}, []float64{9, 9, 9, 9}},
		{Topology{Shared: true, PerHost: 4, Cores: 4}, []float64{3, 7, 11, 15}},
		{Topology{Shared: true, PerHost: 4, Cores: 8}, []float64{9, 9, 9, 9}},
		{Topology{Shared: true, PerHost: 4}, []float64{9, 9, 9, 9}},
	} {
		r := run(t, "ring", s, one, false, x.at, plain{pair: 1})
		for i, want := range x.want {
			if math.Abs(r.Ranks[i].Compute-want) > 1e-12 {
				t.Errorf("%+v: rank %d computes for %g seconds, want %g", x.at, i, r.Ranks[i].Compute, want)
			}
		}
	}
}

// Shared cores carry the 16 bytes that each of two ranks sends, 8 seconds, and compute nothing beside: 8 and twice 4.
func TestSharedCoresCarry(t *testing.T) {
	r := run(t, "ring", specOf(t, false, -1, 4, 2, partition.Contiguous{}), one, false, Topology{Shared: true},
		plain{pair: 1, byte: 0.5})
	if r.Seconds != 16 || r.Ranks[0].Exposed != 8 || r.Ranks[0].Calls != 3 {
		t.Errorf("%+v", r)
	}
}

func TestRanksThatWaitForEachOther(t *testing.T) {
	from := func(peer int) [][]message { return [][]message{{{peer: peer}}} }
	steps := []step{{kind: begin}, {kind: wait}}
	if _, err := simulate([]*program{{rank: 0, steps: steps, exchanges: from(1)}, {rank: 1, steps: steps,
		exchanges: from(0)}}); err == nil {
		t.Error("a message that nobody sends arrives")
	}
}

// sampleOf draws an attention, its partition and costs.
func sampleOf(t testing.TB, rng *rand.Rand) (name, algorithm string, spec ring.Spec, a Attention, c plain) {
	t.Helper()
	ranks := 1 + rng.IntN(8)
	tokens := 2*ranks + rng.IntN(200)
	var docs []int
	layouts := []partition.LayoutName{"zigzag", "striped", "contiguous", "window"}
	if rng.IntN(2) == 0 {
		for left := tokens; left > 0; {
			n := 1 + rng.IntN(left)
			docs, left = append(docs, n), left-n
		}
		layouts = append(layouts, "document", "document-zigzag")
	}
	layout := layouts[rng.IntN(len(layouts))].Layout(docs)
	window := -1
	if rng.IntN(3) == 0 {
		window = rng.IntN(tokens)
	}
	spec = specOf(t, true, window, tokens, ranks, layout, docs...)
	spec.KVHeads = []int{1, 2, 4}[rng.IntN(3)]
	spec.Heads = spec.KVHeads * (1 + rng.IntN(3))
	spec.Inner = []int{1, ranks}[rng.IntN(2)]
	if ranks%2 == 0 {
		spec.Inner = 2
	}
	spec.GatherHeads = rng.IntN(3)
	algorithm = ring.Algorithms[rng.IntN(len(ring.Algorithms))]
	a = Attention{Backend: "flash", DType: tensor.F32, Batch: 1 + rng.IntN(2),
		Mixer: mixer(spec.Heads, spec.KVHeads, 4, -1)}
	c = plain{pair: rng.Float64() / 1000, start: rng.Float64() / 100, byte: rng.Float64() / 10000,
		latency: rng.Float64() / 100, copied: rng.Float64() / 100000, queued: rng.Float64() / 1000}
	name = fmt.Sprintf("%s, %s, %d tokens, %d ranks, window %d, documents %v, %d:%d heads", algorithm, layout.Name(),
		tokens, ranks, window, docs, spec.Heads, spec.KVHeads)
	return name, algorithm, spec, a, c
}

// A pass takes as long as the calls of any rank, and as the bytes on any link; a higher cost never makes it
// faster, and costs in another unit make it another number of the same.
func TestPassHasItsBounds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	turns := 150
	if testing.Short() {
		turns = 75
	}
	for range turns {
		name, algorithm, s, a, c := sampleOf(t, rng)
		both := func(c plain) []Result {
			forward, backward, err := Passes(algorithm, s, a, Topology{}, c)
			if err != nil {
				t.Fatal(err)
			}
			return []Result{forward, backward}
		}
		results, higher := both(c), c
		for i, r := range results {
			for _, x := range r.Ranks {
				if r.Seconds < x.Compute+x.Copies-1e-12 || math.Abs(x.Compute+x.Copies+x.Exposed+x.Host-x.End) > 1e-9 {
					t.Fatalf("%s: %g seconds, but rank %+v", name, r.Seconds, x)
				}
			}
			if b := mostOnALink(t, algorithm, s, a, i > 0, c.byte); r.Seconds < b-1e-12 {
				t.Fatalf("%s: %g seconds, and %g of bytes on one link", name, r.Seconds, b)
			}
		}
		for _, f := range []*float64{&higher.pair, &higher.start, &higher.byte, &higher.latency, &higher.copied,
			&higher.queued} {
			*f *= 1 + rng.Float64()
			for i, h := range both(higher) {
				if r := results[i]; h.Seconds < r.Seconds-1e-12 {
					t.Fatalf("%s: %g seconds with higher costs, %g before", name, h.Seconds, r.Seconds)
				}
			}
		}
		if again := both(c); !reflect.DeepEqual(again, results) {
			t.Fatalf("%s: %v, and %v for the same", name, again, results)
		}
		twice := plain{pair: 2 * c.pair, start: 2 * c.start, byte: 2 * c.byte, latency: 2 * c.latency,
			copied: 2 * c.copied, queued: 2 * c.queued}
		for i, x := range both(twice) {
			if r := results[i]; math.Abs(x.Seconds-2*r.Seconds) > 1e-9 {
				t.Fatalf("%s: %g seconds, and %g of half the size", name, r.Seconds, x.Seconds)
			}
		}
	}
}

// schedules returns the schedules of all ranks.
func schedules(t testing.TB, algorithm string, s ring.Spec) (all []*ring.Schedule) {
	t.Helper()
	p, err := ring.NewPlanner(algorithm, s)
	if err != nil {
		t.Fatal(err)
	}
	p.Prepare()
	for rank := range s.Size {
		all = append(all, p.Schedule(rank))
	}
	return all
}

// mostOnALink returns the seconds of the bytes of the rank that sends most.
func mostOnALink(t testing.TB, algorithm string, s ring.Spec, a Attention, backward bool, byte float64) (most float64) {
	t.Helper()
	all := schedules(t, algorithm, s)
	for rank, x := range all {
		var r Recorder
		if err := r.Run(x, a, partition.Count(s.Layout.Spans(s.SeqKV, s.Size, rank)), backward); err != nil {
			t.Fatal(err)
		}
		most = max(most, float64(r.Sent)*byte)
	}
	return most
}

func TestUnknownCostsTakeForEver(t *testing.T) {
	s := specOf(t, true, -1, 64, 4, partition.Zigzag{})
	for _, unknown := range []float64{math.NaN(), math.Inf(1)} {
		for _, c := range []plain{{pair: unknown}, {byte: unknown}, {copied: unknown}} {
			if r := run(t, "ring", s, one, true, Topology{}, c); !math.IsInf(r.Seconds, 1) {
				t.Errorf("a pass with costs %+v takes %g", c, r.Seconds)
			}
		}
	}
}

// Balanced ranks take the same steps together, so that following a few of them tells the time of all.
func TestSampledRanksStandForAll(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 8 {
		const ranks, perHost = 64, 8
		spec := specOf(t, true, -1, 2048, ranks, partition.Zigzag{})
		spec.Heads, spec.KVHeads, spec.Inner = 16, 8, 8
		a := Attention{Backend: "flash", DType: tensor.BF16, Batch: 1, Mixer: mixer(16, 8, 8, -1)}
		c := plain{pair: rng.Float64() / 1000, byte: rng.Float64() / 1e5, across: rng.Float64() / 1e4}
		at := Topology{PerHost: perHost}
		for _, algorithm := range ring.Algorithms {
			whole := run(t, algorithm, spec, a, false, at, c)
			g, err := newGroup(algorithm, spec, partition.NewIndex(spec.Shape), at.sample(ranks))
			if err != nil {
				t.Fatal(err)
			}
			programs, err := g.programs(a, false)
			if err != nil {
				t.Fatal(err)
			}
			part, err := newPrices(a, at, c).pass(programs, true)
			if err != nil {
				t.Fatal(err)
			}
			if d := part.Seconds/whole.Seconds - 1; math.Abs(d) > 0.05 {
				t.Errorf("%s with %+v: %g seconds, by samples %g: %+.1f %%", algorithm, c, whole.Seconds, part.Seconds,
					100*d)
			}
		}
	}
}

func BenchmarkPass(b *testing.B) {
	for _, ranks := range []int{8, 64, 1024} {
		for _, algorithm := range []string{"ring", "allgather", "hierarchical"} {
			b.Run(fmt.Sprintf("%s/%d", algorithm, ranks), func(b *testing.B) {
				spec := specOf(b, true, -1, 1<<20, ranks, partition.Zigzag{})
				spec.Heads, spec.KVHeads, spec.Inner = 32, 8, 8
				a := Attention{Backend: "flash", DType: tensor.BF16, Batch: 1, Mixer: mixer(32, 8, 128, -1)}
				for b.Loop() {
					run(b, algorithm, spec, a, true, Topology{PerHost: 8}, plain{pair: 1e-12, byte: 1e-11})
				}
			})
		}
	}
}
