package standing

import (
	"maps"
	"slices"
)

// A graph is who is waited for by whom, as far as ranks have told.
type graph struct {
	rows  map[int]*Standing
	waits map[int][]int // by rank, those that it waits for, in order
}

func newGraph(all []Standing) *graph {
	g := &graph{rows: map[int]*Standing{}, waits: map[int][]int{}}
	for i := range all {
		g.rows[all[i].Rank] = &all[i]
	}
	for r, s := range g.rows {
		set := map[int]bool{}
		for i := range s.Waits {
			for _, o := range g.missing(r, &s.Waits[i]) {
				set[o.Peer] = true
			}
		}
		if len(set) > 0 {
			g.waits[r] = slices.Sorted(maps.Keys(set))
		}
	}
	return g
}

// missing returns the messages of a call whose peers have not come to it, as far as is known. If all have,
// it is the link between them that stands, and all are returned.
func (g *graph) missing(rank int, w *Wait) (out []Open) {
	for _, o := range w.Open {
		if o.Peer != rank && !(w.Vague && g.hasCome(o.Peer, rank, w)) {
			out = append(out, o)
		}
	}
	if len(out) > 0 || !w.Vague {
		return out
	}
	for _, o := range w.Open {
		if o.Peer != rank {
			out = append(out, o)
		}
	}
	return out
}

// hasCome reports whether a peer stands in the same call of the same group. Exchanges are not made by
// all ranks, so that their numbers differ; two that name each other stand in the same one.
func (g *graph) hasCome(peer, rank int, w *Wait) bool {
	s := g.rows[peer]
	if s == nil {
		return false
	}
	return slices.ContainsFunc(s.Waits, func(v Wait) bool {
		return v.Group == w.Group && v.Via == w.Via && v.Op == w.Op && (v.Call == w.Call || v.Op == "exchange") &&
			(v.More > 0 || slices.ContainsFunc(v.Open, func(o Open) bool { return o.Peer == rank }))
	})
}

// A holder is a rank that waits for nobody, or tells nothing, and for which others wait.
type holder struct {
	rank    int
	direct  []int // that wait for it
	through []int // that wait for those, and so on
}

// holders lists them, those that hold up most first. Ranks that wait for each other, and for nobody
// else, are cycles; each is returned once, in the order of the waits.
func (g *graph) holders() (hs []holder, cycles [][]int) {
	behind := map[int][]int{} // by rank, those that wait for it
	for _, r := range slices.Sorted(maps.Keys(g.waits)) {
		for _, p := range g.waits[r] {
			behind[p] = append(behind[p], r)
		}
	}
	held := map[int]bool{}
	for _, r := range slices.Sorted(maps.Keys(behind)) {
		if len(g.waits[r]) > 0 {
			continue
		}
		h := holder{rank: r, direct: behind[r]}
		reached := map[int]bool{r: true}
		for next := slices.Clone(h.direct); len(next) > 0; next = next[1:] {
			if q := next[0]; !reached[q] {
				reached[q], held[q] = true, true
				next = append(next, behind[q]...)
				if !slices.Contains(h.direct, q) {
					h.through = append(h.through, q)
				}
			}
		}
		slices.Sort(h.through)
		hs = append(hs, h)
	}
	slices.SortStableFunc(hs, func(a, b holder) int {
		return len(b.direct) + len(b.through) - len(a.direct) - len(a.through)
	})
	return hs, g.cycles(held)
}

// cycles returns those of ranks that no holder holds up.
func (g *graph) cycles(held map[int]bool) (all [][]int) {
	seen := map[int]bool{}
	for _, r := range slices.Sorted(maps.Keys(g.waits)) {
		var path []int
		for !held[r] && !seen[r] {
			seen[r] = true
			path = append(path, r)
			r = g.waits[r][0]
		}
		if at := slices.Index(path, r); at >= 0 {
			all = append(all, path[at:])
		}
	}
	return all
}
