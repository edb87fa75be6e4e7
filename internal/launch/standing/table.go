package standing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// column is one of the table.
type column struct {
	name  string
	right bool // numbers
}

var columns = []column{
	{"rank", true},
	{"host", false},
	{"pid", true},
	{"step", true},
	{"pass", false},
	{"layer", true},
	{"hop", true},
	{"operation", false},
	{"waits for", false},
	{"bytes", true},
	{"s", true},
}

// Table returns one row for each rank, by rank, and below them lines that say who holds up whom.
func Table(all []Standing) string {
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b Standing) int { return cmp.Compare(a.Rank, b.Rank) })
	g := newGraph(all)
	rows := [][]string{nil}
	for _, c := range columns {
		rows[0] = append(rows[0], c.name)
	}
	for i := range all {
		rows = append(rows, g.row(&all[i]))
	}
	var b strings.Builder
	for _, line := range aligned(rows) {
		b.WriteString("  " + line + "\n")
	}
	for _, line := range g.blame() {
		b.WriteString("cprun: " + line + "\n")
	}
	return b.String()
}

// row is what a rank is at. A rank that waits for others shows the first call that it stands for.
func (g *graph) row(s *Standing) []string {
	p := s.place()
	row := []string{fmt.Sprint(s.Rank), s.Host, fmt.Sprint(s.PID), p.step, p.pass, p.layer, p.hop, "", "", "", ""}
	if s.PID == 0 {
		row[2] = ""
	}
	rest := row[7:]
	if s.State != "" {
		rest[0] = s.State
		return row
	}
	if len(s.Waits) == 0 {
		what, since := s.doing()
		rest[0], rest[3] = what, seconds(since)
		return row
	}
	w := &s.Waits[0]
	rest[0], rest[2], rest[3] = w.Op, grouped(w.Bytes), seconds(w.Stood)
	peers := map[int]bool{}
	for _, o := range g.missing(s.Rank, w) {
		peers[o.Peer] = true
	}
	if len(peers) > 0 {
		rest[1] = ranks(sortedKeys(peers))
	}
	return row
}

// aligned are the rows with their columns below each other. A column that says nothing is left out, and
// so is what is empty at the end of a line.
func aligned(rows [][]string) []string {
	widths := make([]int, len(columns))
	for i := range columns {
		for _, row := range rows[1:] {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
		if widths[i] > 0 {
			widths[i] = max(widths[i], len(columns[i].name))
		}
	}
	var lines []string
	for _, row := range rows {
		var parts []string
		for i, text := range row {
			if widths[i] == 0 {
				continue
			}
			if text == "" {
				text = "-"
			}
			space := strings.Repeat(" ", max(widths[i]-utf8.RuneCountInString(text), 0))
			if columns[i].right {
				parts = append(parts, space+text)
			} else {
				parts = append(parts, text+space)
			}
		}
		lines = append(lines, strings.TrimRight(strings.Join(parts, "  "), " "))
	}
	return lines
}
