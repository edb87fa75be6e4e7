package top

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/status"
	"github.com/cprun/cprun/internal/launch/waits"
)

// A column of a table has a fixed width, so that nothing moves when a value changes.
type column struct {
	name  string
	width int
	right bool // numbers
	// spare orders the columns to drop if the terminal is too narrow, the highest first; 0: never.
	spare int
}

// rankColumns are the columns of the table of ranks. The last one gets the remaining width.
var rankColumns = []column{
	{"rank", 4, true, 0},
	{"host", 12, false, 4},
	{"pid", 7, true, 6},
	{"memory", 9, true, 5},
	{"step", 9, true, 2},
	{"pass", 10, false, 1},
	{"layer", 9, true, 3},
	{"hop", 4, true, 0},
	{"s", 5, true, 0},
	{"bytes", 13, true, 7},
	{"operation", 18, false, 0},
	{"waits for", 9, false, 0},
}

// fitted returns the indices of the columns that fit in w, without the names in skip.
func fitted(w int, skip ...string) (use []int) {
	for i, c := range rankColumns {
		if !slices.Contains(skip, c.name) {
			use = append(use, i)
		}
	}
	for {
		taken, worst := -2, 0
		for k, i := range use {
			taken += rankColumns[i].width + 2
			if rankColumns[i].spare > rankColumns[use[worst]].spare {
				worst = k
			}
		}
		if taken <= w || rankColumns[use[worst]].spare == 0 {
			return use
		}
		use = slices.Delete(use, worst, worst+1)
	}
}

// row lays out the cells of a rank. Text on the left gets the remaining width if the cells after it are empty.
func row(use []int, cells []string, w int, style func(i int) Style) (line Line) {
	for k, i := range use {
		c := rankColumns[i]
		last := !slices.ContainsFunc(use[k+1:], func(j int) bool { return cells[j] != "" })
		if last && !c.right {
			return append(line, Span{fill(cells[i], max(c.width, w-line.width()), false), style(i)})
		}
		line = append(line, Span{fill(cells[i], c.width, c.right), style(i)}, Span{"  ", Plain})
	}
	return line
}

func (p *picture) ranks() *list {
	if len(p.Rows) == 0 || !p.State.lives() {
		return nil
	}
	all := make([]waits.WaitState, len(p.Rows))
	for i := range p.Rows {
		all[i] = p.Rows[i].WaitState
	}
	skip, names := "", make([]string, len(rankColumns))
	if len(p.Nodes) < 2 {
		skip = "host"
	}
	for i, c := range rankColumns {
		names[i] = c.name
	}
	use := fitted(p.w, skip)
	title := Span{fmt.Sprintf("%d ranks", len(all)), Bold}
	l := &list{heading: []Line{nil, {title}, row(use, names, p.w, func(int) Style { return Dim })}, first: p.look.Scroll}
	l.more = func(from, to int) Line {
		return Line{title, {fmt.Sprintf(", showing %d to %d", p.Rows[from].Rank, p.Rows[to-1].Rank), Dim}}
	}
	for i, r := range waits.Rows(all) {
		l.rows = append(l.rows, p.rank(&p.Rows[i], r, use))
	}
	blame := waits.Blame(all, heldUp)
	for _, line := range blame[:min(len(blame), 2)] {
		l.below = append(l.below, Line{{line, Warn}})
	}
	return l
}

func (p *picture) rank(s *status.Row, r waits.Row, use []int) Line {
	cells := []string{fmt.Sprint(s.Rank), s.Host, fmt.Sprint(s.PID), "", r.Step, r.Pass, r.Layer, r.Hop, "", "",
		r.Operation, r.WaitsFor}
	if s.Resident > 0 {
		cells[3] = readable.Bytes(s.Resident)
	}
	if r.Known {
		cells[8] = fmt.Sprintf("%.1f", r.For.Seconds())
	}
	if r.Waits {
		cells[9] = readable.Count(r.Bytes)
	}
	return row(use, cells, p.w, func(i int) Style {
		switch {
		case !r.Known && r.Operation != "starts":
			return Bad
		case r.Known && r.Waits && r.For >= heldUp && i >= 10:
			return Warn
		}
		return Plain
	})
}

func (p *picture) nodes() []Line {
	var hosts, live, silent, without []string
	ranks := 0
	for i := range p.Nodes {
		n := &p.Nodes[i]
		hosts = append(hosts, n.Host)
		switch {
		case n.Ranks == 0:
			without = append(without, n.Host)
		case p.isLive(n):
			live, ranks = append(live, n.Host), ranks+n.Ranks
		default:
			silent = append(silent, n.Host)
		}
	}
	var all items
	switch {
	case len(hosts) == 0:
		return nil
	case len(hosts) == 1:
		n := &p.Nodes[0]
		all.add(true, "", n.Host, Plain)
		all.add(true, "launcher", fmt.Sprintf("pid %d", n.PID), Plain)
		all.add(true, "", readable.Counted(n.Ranks, "rank"), Plain)
		return all.flow("node", p.w)
	case !p.State.lives():
		all.add(true, "", fmt.Sprintf("%d: %s", len(hosts), several(hosts)), Plain)
		return all.flow("nodes", p.w)
	}
	text := fmt.Sprintf("%d, with %s", len(live), readable.Counted(ranks, "rank"))
	if len(live) <= maxHosts {
		text += ": " + strings.Join(live, ", ")
	}
	all.add(true, "", text, Plain)
	all.add(len(silent) > 0, "silent", several(silent), Warn)
	all.add(len(without) > 0, "without", several(without), Warn)
	return all.flow("nodes", p.w)
}

const maxHosts = 4

func several(hosts []string) string {
	if len(hosts) > maxHosts {
		return fmt.Sprintf("%s and %d more", strings.Join(hosts[:maxHosts], ", "), len(hosts)-maxHosts)
	}
	return strings.Join(hosts, ", ")
}

// isLive reports whether a node's rows are among the visible ones.
func (p *picture) isLive(n *status.Node) bool {
	byRank := func(r status.Row, rank int) int { return r.Rank - rank }
	at, _ := slices.BinarySearchFunc(p.Rows, n.FirstRank, byRank)
	return at < len(p.Rows) && p.Rows[at].Rank < n.FirstRank+n.Ranks
}

func (p *picture) events() *list {
	l := &list{heading: []Line{nil, {{"events", Bold}}}, last: true}
	for _, e := range p.Events {
		at := p.clock(e.At)
		if e.More {
			at = ""
		}
		text := strings.ReplaceAll(e.Text, "\t", " ")
		l.rows = append(l.rows, Line{{fill(at, nameWidth, false) + "  ", Dim}, {text, Plain}})
	}
	return l
}
