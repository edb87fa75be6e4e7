package top

import (
	"cmp"
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

// fitted reports the columns that fit in w, without the names in skip.
func fitted(all []column, w int, skip ...string) []bool {
	use, taken := make([]bool, len(all)), -2
	for i, c := range all {
		use[i] = true
		for _, s := range skip {
			use[i] = use[i] && s != c.name
		}
		if use[i] {
			taken += c.width + 2
		}
	}
	for taken > w {
		worst := -1
		for i, c := range all {
			if use[i] && c.spare > 0 && (worst < 0 || c.spare > all[worst].spare) {
				worst = i
			}
		}
		if worst < 0 {
			break
		}
		use[worst] = false
		taken -= all[worst].width + 2
	}
	return use
}

func row(all []column, use []bool, cells []string, w int, style func(i int) Style) Line {
	var line Line
	at := 0
	for i, c := range all {
		if !use[i] {
			continue
		}
		n := c.width
		if i == len(all)-1 {
			n = max(n, w-at)
		}
		text := fill(cells[i], n, c.right)
		if !c.right && width(cells[i]) > n && i < len(all)-1 && blank(all, use, cells, i+1) {
			text = fill(cells[i], w-at, false) // the rest is empty
			return append(line, Span{text, style(i)})
		}
		line = append(line, Span{text, style(i)}, Span{"  ", Plain})
		at += n + 2
	}
	return line.clip(w)
}

func blank(all []column, use []bool, cells []string, i int) bool {
	for ; i < len(all); i++ {
		if use[i] && cells[i] != "" {
			return false
		}
	}
	return true
}

func names(all []column, use []bool, w int) Line {
	cells := make([]string, len(all))
	for i, c := range all {
		cells[i] = c.name
	}
	return row(all, use, cells, w, func(int) Style { return Dim })
}

func (p *picture) ranks() *list {
	if len(p.Rows) == 0 || !p.State.lives() {
		return nil
	}
	all := make([]waits.WaitState, len(p.Rows))
	for i := range p.Rows {
		all[i] = p.Rows[i].WaitState
	}
	var skip []string
	if len(p.Nodes) < 2 {
		skip = []string{"host"}
	}
	use := fitted(rankColumns, p.w, skip...)
	l := &list{heading: []Line{nil, {{fmt.Sprintf("%d ranks", len(all)), Bold}}, names(rankColumns, use, p.w)},
		first: p.look.Scroll}
	l.more = func(from, to, of int) Line {
		return Line{{fmt.Sprintf("%d ranks", of), Bold}, {fmt.Sprintf(", showing %d to %d", p.Rows[from].Rank,
			p.Rows[to-1].Rank), Dim}}
	}
	for i, r := range waits.Rows(all) {
		l.rows = append(l.rows, p.rank(&p.Rows[i], r, use))
	}
	for i, line := range waits.Blame(all, heldUp) {
		if i < 2 {
			l.below = append(l.below, Line{{clip(line, p.w), Warn}})
		}
	}
	return l
}

func (p *picture) rank(s *status.Row, r waits.Row, use []bool) Line {
	cells := []string{
		fmt.Sprint(s.Rank), s.Host, fmt.Sprint(s.PID), readable.Bytes(s.Resident), r.Step, r.Pass, r.Layer, r.Hop,
		fmt.Sprintf("%.1f", r.For.Seconds()),
		"", r.Operation, r.WaitsFor,
	}
	if s.Resident == 0 {
		cells[3] = ""
	}
	if r.Waits {
		cells[9] = readable.Count(r.Bytes)
	}
	style := Plain
	switch {
	case !r.Known && r.Operation != "starts":
		style, cells[8] = Bad, ""
	case !r.Known:
		cells[8] = ""
	case r.For >= heldUp && r.Waits:
		style = Warn
	}
	return row(rankColumns, use, cells, p.w, func(i int) Style {
		if i < 10 && style != Bad {
			return Plain
		}
		return style
	})
}

func (p *picture) nodes() []Line {
	switch {
	case len(p.Nodes) == 0:
		return nil
	case len(p.Nodes) == 1:
		n := &p.Nodes[0]
		return flow("node", []item{{text: n.Host, style: Plain}, {"launcher", fmt.Sprintf("pid %d", n.PID), Plain},
			{"", readable.Counted(n.Ranks, "rank"), Plain}}, p.w)
	}
	if !p.State.lives() {
		hosts := make([]string, len(p.Nodes))
		for i := range p.Nodes {
			hosts[i] = p.Nodes[i].Host
		}
		return flow("nodes", []item{{text: fmt.Sprintf("%d: %s", len(hosts), several(hosts)), style: Plain}}, p.w)
	}
	var live, silent, without []string
	ranks := 0
	for i := range p.Nodes {
		n := &p.Nodes[i]
		switch {
		case n.Ranks == 0:
			without = append(without, n.Host)
		case p.isLive(n):
			live, ranks = append(live, n.Host), ranks+n.Ranks
		default:
			silent = append(silent, n.Host)
		}
	}
	items := []item{{text: fmt.Sprintf("%d, with %s", len(live), readable.Counted(ranks, "rank")), style: Plain}}
	if len(live) <= maxHosts {
		items[0].text += ": " + strings.Join(live, ", ")
	}
	if len(silent) > 0 {
		items = append(items, item{"silent", several(silent), Warn})
	}
	if len(without) > 0 {
		items = append(items, item{"without", several(without), Warn})
	}
	return flow("nodes", items, p.w)
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
	byRank := func(r status.Row, rank int) int { return cmp.Compare(r.Rank, rank) }
	at, _ := slices.BinarySearchFunc(p.Rows, n.FirstRank, byRank)
	return at < len(p.Rows) && p.Rows[at].Rank < n.FirstRank+n.Ranks
}

func (p *picture) events() *list {
	l := &list{heading: []Line{nil, {{"events", Bold}}}, last: true}
	for _, e := range p.Events {
		at := ""
		if !e.More {
			at = p.clock(e.At)
		}
		l.rows = append(l.rows, Line{{fill(at, nameWidth, false) + "  ", Dim},
			{strings.ReplaceAll(e.Text, "\t", " "), Plain}})
	}
	return l
}
