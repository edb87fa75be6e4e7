package planner

import (
	"math"
	"slices"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Strategies lists the strategies of a case over these backends, in order of preference. They agree with asked; its
// empty fields, and a Gather of auto, are open.
//
// Others have to beat a ring in a zigzag. An all-gather comes first if ranks share cores, where no transfer overlaps;
// for packed documents, since a ring sends more rows than ranks read; and if all layers have a window. If the window is
// short, the rows fit one call, whose measured gain over two calls exceeds the predicted one. There the layout of a
// window comes first. A striped layout is listed only on request: it balances like a zigzag, and cuts the tiles of
// every two ranks by the mask's edges.
func Strategies(c Workload, asked ring.Strategy, backends []string) (list []ring.Strategy) {
	documents := len(c.Docs) > 0
	layouts := []partition.LayoutName{"zigzag", "contiguous"}
	algorithms := []string{"ring", "allgather", "ulysses", "hierarchical"}
	if documents || c.Ranks > 1 && (c.Topology.Shared || c.windowed(math.MaxInt)) {
		algorithms[0], algorithms[1] = algorithms[1], algorithms[0]
	}
	if documents {
		layouts = []partition.LayoutName{"document", "document-zigzag", "zigzag", "contiguous"}
		if c.Topology.Shared { // a zigzag cuts documents once more, into tiles that cost more than they hide
			layouts[2], layouts[3] = layouts[3], layouts[2]
		}
	}
	switch {
	case c.Ranks > ExactRanks:
		layouts = layouts[:1] // timing layouts without balance takes long
	case c.Ranks == 1:
		layouts, algorithms = layouts[:1], algorithms[:1] // all are the same
	case c.windowed(math.MaxInt) && !documents && !c.Topology.Shared:
		layouts = []partition.LayoutName{"window", "contiguous", "zigzag"}
	}
	if asked.Layout != "" {
		layouts = []partition.LayoutName{asked.Layout}
	}
	if asked.Algorithm != "" {
		algorithms = []string{asked.Algorithm}
	}
	for _, backend := range backends {
		for _, layout := range layouts {
			for _, algorithm := range algorithms {
				s := ring.Strategy{Layout: layout, Algorithm: algorithm, Backend: backend}
				s.Gather = ruledGather(c, asked.Gather)
				idle := algorithm == "ulysses" && c.Ranks > c.least(heads) // some ranks would have no heads
				switch {
				case algorithm == "allgather":
					list = append(list, gathered(s, c, asked)...)
				case algorithm == "hierarchical":
					for _, inner := range inners(c, asked) {
						s.Inner = inner
						list = append(list, s)
					}
				case !idle || asked.Algorithm != "":
					list = append(list, s)
				}
			}
		}
	}
	return list
}

func heads(k LayerGroup) int   { return k.Heads }
func kvHeads(k LayerGroup) int { return k.KVHeads }

// least returns the smallest count of heads in any layer.
func (c *Workload) least(of func(LayerGroup) int) int {
	return of(slices.MinFunc(c.Layers, func(a, b LayerGroup) int { return of(a) - of(b) }))
}

// windowed reports whether every layer has a sliding window of at most so many keys.
func (c *Workload) windowed(most int) bool {
	return !slices.ContainsFunc(c.Layers, func(k LayerGroup) bool { return k.Window < 0 || k.Window > most })
}

// open reports whether when rows travel is open.
func open(gather string) bool { return gather == "" || gather == ring.Auto }

// ruledGather returns when rows travel in a window: as asked, or by the meaning of auto there.
func ruledGather(c Workload, asked string) string {
	switch {
	case !open(asked):
		return asked
	case len(c.Docs) > 0 && c.Ranks > 1 && c.Topology.edge(c.Ranks) == 0:
		return ring.Auto
	}
	return ""
}

// gathered lists the variants of an all-gather: of some heads at a time, and with rows that travel before the only
// call. cuDNN's backward pass also computes the masked pairs of a rectangle with more keys than queries, which no
// figure of a table shows, so its rows never travel before the only call of that pass.
func gathered(s ring.Strategy, c Workload, asked ring.Strategy) (list []ring.Strategy) {
	documents := len(c.Docs) > 0
	times := []string{s.Gather}
	if open(asked.Gather) && c.Ranks > 1 {
		for _, x := range []string{"", ring.Auto, ring.Before} {
			able := x != ring.Before || s.Backend != backends.Fused.String()
			if able && x != s.Gather && (x != ring.Auto || documents) {
				times = append(times, x)
			}
		}
		// A backward pass of documents in one call of flash that waits for rows took 7 % less than in two calls.
		// Over two H200s, with 8 KV heads, one call took 7 to 9 % less than two for a window of a quarter of a rank's
		// rows; over four, 1 to 3 % more for half of them (docs/benchmarks, regret.json).
		if documents && c.Topology.gated(s.Backend, c.DType, c.Ranks) ||
			!documents && (c.Topology.Shared || c.windowed(c.Tokens/c.Ranks/3)) {
			slices.Reverse(times)
		}
	}
	for _, heads := range gathers(c, asked) {
		for _, gather := range times {
			if s.GatherHeads, s.Gather = heads, gather; heads == 0 || gather == times[0] {
				list = append(list, s)
			}
		}
	}
	return list
}

// gathers lists how many heads may be gathered at a time: all, or equal parts. Parts have their transfers run beside
// calls, which gains nothing where both share cores.
func gathers(c Workload, asked ring.Strategy) []int {
	if asked.GatherHeads > 0 || asked.Algorithm != "" || c.Ranks == 1 || c.Topology.Shared {
		return []int{asked.GatherHeads}
	}
	list := []int{0}
	for n := c.least(kvHeads) / 2; n > 0; n /= 2 {
		if !slices.ContainsFunc(c.Layers, func(k LayerGroup) bool { return k.KVHeads%n != 0 }) {
			list = append(list, n)
		}
	}
	return list
}

// inners lists how many ranks may exchange heads: divisors of the group with at least one head each, except one and
// all, which are other algorithms. Groups lie inside hosts, or hosts inside groups.
func inners(c Workload, asked ring.Strategy) (list []int) {
	if asked.Inner > 0 {
		return []int{asked.Inner}
	}
	perHost := c.Topology.PerHost
	if perHost <= 0 {
		perHost = c.Ranks
	}
	for n := 2; n < c.Ranks; n++ {
		if c.Ranks%n == 0 && n <= c.least(heads) && (perHost%n == 0 || n%perHost == 0) {
			list = append(list, n)
		}
	}
	if len(list) == 0 && asked.Algorithm != "" {
		list = []int{partition.Inner(c.Ranks, perHost, c.least(heads), c.least(kvHeads))}
	}
	slices.Reverse(list)
	return list
}
