package standing

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// maxBlamed bounds the named ranks, or cycles of them.
const maxBlamed = 4

// blame returns lines that name the ranks that hold up others.
func (g *graph) blame() (lines []string) {
	holders, cycles := g.holders()
	for i, h := range holders {
		if i == maxBlamed {
			lines = append(lines, fmt.Sprintf("%d ranks more hold up others", len(holders)-i))
			break
		}
		line := fmt.Sprintf("rank %d holds up %s", h.rank, namely(h.direct))
		if len(h.through) > 0 {
			line += ", and by that " + namely(h.through)
		}
		lines = append(lines, line+": "+g.excuse(h.rank))
	}
	for i, c := range cycles {
		if i == maxBlamed {
			break
		}
		lines = append(lines, g.together(c))
	}
	if len(lines) == 0 {
		lines = append(lines, "no rank waits for another")
	}
	return lines
}

// passing is how long ranks may wait for each other before something is wrong: while data is on its way
// they do as well.
const passing = 5 * time.Second

// together reports a cycle of ranks that wait for each other, with the likely cause.
func (g *graph) together(cycle []int) string {
	least := g.rows[cycle[0]].Waits[0].Stood
	for _, r := range cycle {
		least = min(least, g.rows[r].Waits[0].Stood)
	}
	if least < passing {
		return fmt.Sprintf("%s wait for each other, for %s s: data may be on its way", chain(cycle), seconds(least))
	}
	return fmt.Sprintf("%s wait for each other, for %s s: they stand in different calls, or the way between them is "+
		"broken", chain(cycle), seconds(least))
}

// excuse returns why a rank that waits for no one has not come.
func (g *graph) excuse(rank int) string {
	s := g.rows[rank]
	switch {
	case s == nil:
		return "nothing is known of it"
	case s.State != "":
		return "it " + s.State
	}
	what, since := s.doing()
	text := fmt.Sprintf("it is at %s for %s s", what, seconds(since))
	if p := s.place().String(); p != "" && p != what {
		text = fmt.Sprintf("it is at %s for %s s (%s)", what, seconds(since), p)
	}
	if len(s.Waits) > 0 {
		text = fmt.Sprintf("it stands in %s, and waits for no rank there", s.Waits[0].Op)
	}
	return text
}

// maxChain bounds the named ranks of a cycle.
const maxChain = 8

// chain returns a cycle of ranks: "ranks 0 -> 1 -> 0".
func chain(c []int) string {
	var parts []string
	for _, r := range c[:min(len(c), maxChain)] {
		parts = append(parts, fmt.Sprint(r))
	}
	if len(c) > maxChain {
		parts = append(parts, fmt.Sprintf("(%d more)", len(c)-maxChain))
	}
	return "ranks " + strings.Join(append(parts, fmt.Sprint(c[0])), " -> ")
}

// namely returns "rank 3", or "ranks 0-2, 5".
func namely(rs []int) string {
	if len(rs) == 1 {
		return fmt.Sprintf("rank %d", rs[0])
	}
	return "ranks " + ranks(rs)
}

// maxRanges bounds the listed ranges of ranks.
const maxRanges = 6

// ranks lists ranks in order, consecutive ones as a range: "0-2, 5".
func ranks(rs []int) string {
	var parts []string
	for i := 0; i < len(rs); {
		j := i
		for j+1 < len(rs) && rs[j+1] == rs[j]+1 {
			j++
		}
		if len(parts) == maxRanges {
			return strings.Join(parts, ", ") + fmt.Sprintf(", %d more", len(rs)-i)
		}
		switch j - i {
		case 0:
			parts = append(parts, fmt.Sprint(rs[i]))
		case 1:
			parts = append(parts, fmt.Sprint(rs[i]), fmt.Sprint(rs[j]))
		default:
			parts = append(parts, fmt.Sprintf("%d-%d", rs[i], rs[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ", ")
}

func sortedKeys(set map[int]bool) []int { return slices.Sorted(maps.Keys(set)) }

// A graph is who is waited for by whom, as far as ranks have told.
type graph struct {
	rows  map[int]*Standing
	waits map[int][]int // by rank, the ranks that it waits for, in order
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

// missing returns the messages of a call whose peers have not reached it, as far as known. If all have, the link
// between them is at fault, and it returns all messages.
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

// hasCome reports whether a peer waits in the same call of the same group. Not all ranks make each exchange, so their
// numbers differ; two exchanges that name each other match.
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

// A holder is a rank that waits for no one, or tells nothing, and for which others wait.
type holder struct {
	rank    int
	direct  []int // that wait for it
	through []int // that wait for those, and so on
}

// holders lists them, those that hold up most first. Ranks that wait for each other, and for no one
// else, are cycles; each is returned once, in the order of the waits.
func (g *graph) holders() (hs []holder, cycles [][]int) {
	behind := map[int][]int{} // by rank, the ranks that wait for it
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

// cycles returns the cycles of ranks that no holder holds up.
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
