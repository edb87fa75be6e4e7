package planner

import (
	"slices"

	"github.com/cprun/cprun/partition"
)

// Asked is what a config says of a way; what is left empty is to be chosen.
type Asked struct {
	Layout, Algorithm  string
	Inner, GatherHeads int
	Backends           []string // that can run it, the preferred one first
	Documents          bool     // sequences are packed documents that do not see each other
}

// Ways lists the ways for a case that agree with what was asked for, in order of preference: a ring in a zigzag is what
// everything else has to beat. A striped layout is not among them unless it is asked for: it balances as a zigzag does,
// cuts the tiles of every pair of ranks by the mask's edges, which kernels pay for, and spreads windows over all ranks.
func Ways(c Case, a Asked) (list []Way) {
	layouts, algorithms := []string{"zigzag", "contiguous"}, []string{"ring", "allgather", "ulysses", "hierarchical"}
	if a.Documents { // of which a ring sends more than is read
		algorithms = []string{"allgather", "ring", "ulysses", "hierarchical"}
		layouts = []string{"document", "document-zigzag", "zigzag", "contiguous"}
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
				w := Way{Layout: layout, Algorithm: algorithm, Backend: b}
				switch algorithm {
				case "allgather":
					for _, n := range gathers(c, a) {
						w.GatherHeads = n
						list = append(list, w)
					}
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
// layers, and a ring and an all-gather, of one layout and backend. Which rows travel and how they balance
// changes with the lengths of documents, and trading heads does not.
func Shortlist(chosen Way, more ...Way) (list []Way) {
	same := Way{Layout: chosen.Layout, Backend: chosen.Backend}
	ring, gather := same, same
	ring.Algorithm, gather.Algorithm = "ring", "allgather"
	for _, w := range append(append([]Way{chosen}, more...), ring, gather) {
		if w.Layout == same.Layout && w.Backend == same.Backend && !slices.Contains(list, w) {
			list = append(list, w)
		}
	}
	return list
}
