package planner

import (
	"slices"

	"github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Asked is what a config says of a way; what is left empty is to be chosen.
type Asked struct {
	Layout, Algorithm  string
	Inner, GatherHeads int
	Gather             string   // of ring.Gathers; auto and "": to be chosen
	Backends           []string // that can run it, the preferred one first
	Documents          bool     // sequences are packed documents that do not see each other
}

// Ways lists the ways for a case that agree with what was asked for, in order of preference: a ring in a zigzag is what
// everything else has to beat; where ranks share cores, nothing hides behind calls, and it is an all-gather whose rows travel before
// the only call. A striped layout is not among them unless it is asked for: it balances as a zigzag does,
// cuts the tiles of every pair of ranks by the mask's edges, which kernels pay for, and spreads windows over all ranks.
func Ways(c Case, a Asked) (list []Way) {
	layouts, algorithms := []string{"zigzag", "contiguous"}, []string{"ring", "allgather", "ulysses", "hierarchical"}
	if c.At.Shared && c.Ranks > 1 {
		algorithms = []string{"allgather", "ring", "ulysses", "hierarchical"}
	}
	if a.Documents { // of which a ring sends more than is read
		algorithms = []string{"allgather", "ring", "ulysses", "hierarchical"}
		layouts = []string{"document", "document-zigzag", "zigzag", "contiguous"}
		if c.At.Shared { // where more tiles, of documents that a zigzag cuts once more, cost more than they hide
			layouts = []string{"document", "document-zigzag", "contiguous", "zigzag"}
		}
	}
	if c.Ranks > ExactRanks {
		layouts = layouts[:1] // ranks that are not balanced are not worth the time to find it out
	}
	if c.Ranks == 1 {
		layouts, algorithms = layouts[:1], algorithms[:1] // all are the same
	}
	if a.Layout != "" {
		layouts = []string{a.Layout}
	}
	if a.Algorithm != "" {
		algorithms = []string{a.Algorithm}
	}
	for _, b := range a.Backends {
		for _, layout := range layouts {
			for _, algorithm := range algorithms {
				w := Way{Layout: layout, Algorithm: algorithm, Backend: b, Gather: a.gather(c)}
				switch algorithm {
				case "allgather":
					list = append(list, gathered(w, c, a)...)
					continue
				case "hierarchical":
					for _, n := range inners(c, a) {
						w.Inner = n
						list = append(list, w)
					}
					continue
				case "ulysses":
					if a.Algorithm == "" && c.Ranks > c.Heads {
						continue // some ranks would have no heads
					}
				}
				list = append(list, w)
			}
		}
	}
	return list
}

// gather is when rows travel that are fetched in one hop, where nothing is chosen: what was asked for, or what auto means.
func (a *Asked) gather(c Case) string {
	switch {
	case a.Gather != "" && a.Gather != ring.Auto:
		return a.Gather
	case a.Documents && c.Ranks > 1 && c.At.edge(c.Ranks) == 0:
		return ring.Auto
	}
	return ""
}

// gathered is the ways of an all-gather: of some heads, and with rows that travel before the only call.
func gathered(w Way, c Case, a Asked) (list []Way) {
	times := []string{w.Gather}
	if open := a.Gather == "" || a.Gather == ring.Auto; open && c.Ranks > 1 {
		times = befores(w, a.Documents)
		if c.At.Shared && !a.Documents {
			slices.Reverse(times)
		}
	}
	for _, w.GatherHeads = range gathers(c, a) {
		for _, w.Gather = range times {
			if w.GatherHeads == 0 || w.Gather == times[0] {
				list = append(list, w)
			}
		}
	}
	return list
}

// befores are the times at which rows may travel, that of the way first. cuDNN's backward pass computes the masked pairs of a rectangle with more keys
// than queries, too, which no figure of a table shows, so that it never has the rows of others in its only call.
func befores(w Way, documents bool) []string {
	list := []string{w.Gather}
	for _, x := range []string{"", ring.Auto, ring.Before} {
		if x != w.Gather && (x != ring.Auto || documents) && (x != ring.Before || w.Backend != backends.Fused.String()) {
			list = append(list, x)
		}
	}
	return list
}

// gathers is how many heads may be gathered at a time: all, or parts that are alike. Where transfers and calls share
// cores nothing is gained by parts, whose transfers run beside calls.
func gathers(c Case, a Asked) []int {
	if a.GatherHeads > 0 || a.Algorithm != "" || c.Ranks == 1 || c.At.Shared {
		return []int{a.GatherHeads}
	}
	list := []int{0}
	for n := c.KVHeads / 2; n > 0; n /= 2 {
		if c.KVHeads%n == 0 {
			list = append(list, n)
		}
	}
	return list
}

// inners is how many ranks may trade heads: divisors of the group with at least one head each, and not all
// nor none, which are other algorithms. Groups lie inside hosts, or hosts inside groups.
func inners(c Case, a Asked) (list []int) {
	if a.Inner > 0 {
		return []int{a.Inner}
	}
	perHost := c.At.PerHost
	if perHost <= 0 {
		perHost = c.Ranks
	}
	for n := 2; n < c.Ranks; n++ {
		if c.Ranks%n == 0 && n <= c.Heads && (perHost%n == 0 || n%perHost == 0) {
			list = append(list, n)
		}
	}
	if len(list) == 0 && a.Algorithm != "" {
		list = []int{partition.Inner(c.Ranks, perHost, c.Heads, c.KVHeads)}
	}
	slices.Reverse(list)
	return list
}

// Shortlist returns the few ways that a packing chooses from: those that the whole run has chosen for any kind of
// layers, and a ring and an all-gather, beside the own keys or before the call, of one layout and backend. Which rows travel and how they balance
// changes with the lengths of documents, and trading heads does not.
func Shortlist(chosen Way, more ...Way) (list []Way) {
	same := Way{Layout: chosen.Layout, Backend: chosen.Backend}
	circle, gather := same, same
	circle.Algorithm, gather.Algorithm = "ring", "allgather"
	circle.Gather = chosen.Gather
	few := append(append([]Way{chosen}, more...), circle)
	for _, gather.Gather = range befores(chosen, true) {
		few = append(few, gather)
	}
	for _, w := range few {
		if w.Layout == same.Layout && w.Backend == same.Backend && !slices.Contains(list, w) {
			list = append(list, w)
		}
	}
	return list
}
