package standing

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// maxBlamed is how many ranks, or cycles of them, are named.
const maxBlamed = 4

// blame are lines that say who holds up whom.
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
// they do, too.
const passing = 5 * time.Second

// together says that the ranks of a cycle wait for each other, and what that may mean.
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

// excuse is why a rank that waits for nobody has not come.
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

// maxChain is how many ranks of a cycle are named.
const maxChain = 8

// chain is a cycle of ranks: "ranks 0 -> 1 -> 0".
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

// namely is "rank 3", or "ranks 0-2, 5".
func namely(rs []int) string {
	if len(rs) == 1 {
		return fmt.Sprintf("rank %d", rs[0])
	}
	return "ranks " + ranks(rs)
}

// maxRanges is how many ranges of ranks are listed.
const maxRanges = 6

// ranks lists ranks in order, with those that follow each other in one range: "0-2, 5".
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
