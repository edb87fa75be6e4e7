package standing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// A column is one of the table.
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

// Table returns one row for each rank, by rank, and below them lines that name the ranks that hold up others.
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

// Row is one rank's account in words. A part is "" if unknown or absent.
type Row struct {
	// Step to Hop say where in the run the rank is.
	Step, Pass, Layer, Hop string
	Operation              string        // the call that it stands for, or its own work
	WaitsFor               string        // ranks that have not come to that call: "0-2, 5"
	Waits                  bool          // Operation is a call between ranks
	Known                  bool          // it tells of itself; otherwise Operation is why not
	Bytes                  int64         // open bytes of the call
	For                    time.Duration // without progress of the call, or at its own work
}

// Rows returns what each rank is at, in the order of all. A rank that waits for others shows the first call that
// it stands for.
func Rows(all []Standing) []Row {
	g := newGraph(all)
	rows := make([]Row, len(all))
	for i := range all {
		rows[i] = g.look(&all[i])
	}
	return rows
}

// Blame returns lines that name the ranks that hold up others; none if no rank has waited for at least least.
func Blame(all []Standing, least time.Duration) []string {
	long := func(s Standing) bool { return len(s.Waits) > 0 && s.Waits[0].Stood >= least }
	if !slices.ContainsFunc(all, long) {
		return nil
	}
	return newGraph(all).blame()
}

// look returns a rank's row.
func (g *graph) look(s *Standing) Row {
	p := s.place()
	r := Row{Step: p.step, Pass: p.pass, Layer: p.layer, Hop: p.hop, Known: s.State == "", Operation: s.State}
	if !r.Known {
		return r
	}
	if len(s.Waits) == 0 {
		r.Operation, r.For = s.doing()
		return r
	}
	w := &s.Waits[0]
	r.Operation, r.Waits, r.Bytes, r.For = w.Op, true, w.Bytes, w.Stood
	peers := map[int]bool{}
	for _, o := range g.missing(s.Rank, w) {
		peers[o.Peer] = true
	}
	r.WaitsFor = ranks(sortedKeys(peers))
	return r
}

// row returns what the table shows of a rank.
func (g *graph) row(s *Standing) []string {
	r := g.look(s)
	row := []string{fmt.Sprint(s.Rank), s.Host, fmt.Sprint(s.PID), r.Step, r.Pass, r.Layer, r.Hop, r.Operation,
		r.WaitsFor, "", ""}
	if s.PID == 0 {
		row[2] = ""
	}
	if r.Waits {
		row[9] = grouped(r.Bytes)
	}
	if r.Known {
		row[10] = seconds(r.For)
	}
	return row
}

// aligned pads the columns. It drops empty columns, and empty cells at the end of a line.
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
