package waits

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/base/readable"
)

// maxBlamed bounds the named ranks, and the named cycles.
const maxBlamed = 4

// blame returns lines that name the ranks that hold up others.
func (g *graph) blame() (lines []string) {
	holders, cycles := g.holders()
	for _, h := range holders[:min(len(holders), maxBlamed)] {
		line := fmt.Sprintf("rank %d holds up %s", h.rank, Ranks(h.direct))
		if len(h.through) > 0 {
			line += ", and by that " + Ranks(h.through)
		}
		lines = append(lines, line+": it "+g.reasonFor(h.rank))
	}
	if n := len(holders) - maxBlamed; n > 0 {
		lines = append(lines, fmt.Sprintf("%d more ranks hold up others", n))
	}
	for _, c := range cycles[:min(len(cycles), maxBlamed)] {
		lines = append(lines, g.describeCycle(c))
	}
	if len(lines) == 0 {
		lines = append(lines, "no rank waits for another")
	}
	return lines
}

// Holder returns the rank that holds up most others, and how; -1: none does.
func Holder(all []WaitState) (rank int, how string) {
	g := newGraph(all)
	holders, _ := g.holders()
	if len(holders) == 0 {
		return -1, ""
	}
	h := holders[0]
	return h.rank, fmt.Sprintf("it held up %s: it %s", Ranks(h.direct), g.reasonFor(h.rank))
}

// cycleTolerance is the time for which ranks may wait for each other without a fault: they also do while data is in
// transit.
const cycleTolerance = 5 * time.Second

// describeCycle reports a cycle of ranks that wait for each other, with the likely cause.
func (g *graph) describeCycle(cycle []int) string {
	least := g.rows[cycle[0]].Waits[0].Stalled
	for _, r := range cycle {
		least = min(least, g.rows[r].Waits[0].Stalled)
	}
	cause := "they are in different calls, or the link between them is broken"
	if least < cycleTolerance {
		cause = "data may be in transit"
	}
	return fmt.Sprintf("%s wait for each other, for %s s: %s", cycleText(cycle), seconds(least), cause)
}

// reasonFor returns why a rank that waits for no other has not reached the call.
func (g *graph) reasonFor(rank int) string {
	s := g.rows[rank]
	switch {
	case s == nil:
		return "gives no account"
	case s.State != "":
		return s.State
	case len(s.Waits) > 0:
		return fmt.Sprintf("is in %s, and waits for no rank there", s.Waits[0].Op)
	}
	what, since := s.activity()
	text := fmt.Sprintf("is at %s for %s s", what, seconds(since))
	if p := s.position().String(); p != "" && p != what {
		text += " (" + p + ")"
	}
	return text
}

// maxChain bounds the named ranks of a cycle.
const maxChain = 8

// cycleText formats a cycle of ranks: "ranks 0 -> 1 -> 0".
func cycleText(c []int) string {
	var parts []string
	for _, r := range c[:min(len(c), maxChain)] {
		parts = append(parts, fmt.Sprint(r))
	}
	if len(c) > maxChain {
		parts = append(parts, fmt.Sprintf("(%d more)", len(c)-maxChain))
	}
	return "ranks " + strings.Join(append(parts, fmt.Sprint(c[0])), " -> ")
}

// Ranks returns "rank 3", or "ranks 0-2, 5".
func Ranks(rs []int) string {
	if len(rs) == 1 {
		return fmt.Sprintf("rank %d", rs[0])
	}
	return "ranks " + ranges(rs)
}

// maxRanges bounds the listed ranges of ranks.
const maxRanges = 6

// ranges lists ranks in order, three or more consecutive ones as a range: "0-2, 5".
func ranges(rs []int) string {
	var parts []string
	for i := 0; i < len(rs); i++ {
		if len(parts) == maxRanges {
			return strings.Join(parts, ", ") + fmt.Sprintf(", %d more", len(rs)-i)
		}
		part, j := fmt.Sprint(rs[i]), i
		for j+1 < len(rs) && rs[j+1] == rs[j]+1 {
			j++
		}
		if j > i+1 {
			part, i = fmt.Sprintf("%s-%d", part, rs[j]), j
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ")
}

// A graph contains the edges from waiting ranks to their peers.
type graph struct {
	rows  map[int]*WaitState
	waits map[int][]int // for each rank, the ranks that it waits for, in order
}

func newGraph(all []WaitState) *graph {
	g := &graph{rows: map[int]*WaitState{}, waits: map[int][]int{}}
	for i := range all {
		g.rows[all[i].Rank] = &all[i]
	}
	for r, s := range g.rows {
		if peers := g.awaited(r, s.Waits); len(peers) > 0 {
			g.waits[r] = peers
		}
	}
	return g
}

// awaited returns the peers that have not reached a rank's calls, as far as known. If all have, the link between them
// is at fault, and it returns all.
func (g *graph) awaited(rank int, calls []Wait) []int {
	peers := map[int]bool{}
	for i := range calls {
		w := &calls[i]
		open := slices.DeleteFunc(slices.Clone(w.Open), func(o Open) bool { return o.Peer == rank })
		late := func(o Open) bool { return !w.Unresolved || !g.hasReached(o.Peer, rank, w) }
		some := slices.ContainsFunc(open, late)
		for _, o := range open {
			if !some || late(o) {
				peers[o.Peer] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(peers))
}

// hasReached reports whether a peer waits in the same call of the same group. Ranks may make different numbers of
// exchanges, so two exchanges that name each other match.
func (g *graph) hasReached(peer, rank int, w *Wait) bool {
	s := g.rows[peer]
	if s == nil {
		return false
	}
	return slices.ContainsFunc(s.Waits, func(v Wait) bool {
		return v.Group == w.Group && v.Via == w.Via && v.Op == w.Op && (v.Call == w.Call || v.Op == "exchange") &&
			(v.More > 0 || slices.ContainsFunc(v.Open, func(o Open) bool { return o.Peer == rank }))
	})
}

// A holder is a rank that others wait for, and that waits for none or gives no account.
type holder struct {
	rank    int
	direct  []int // ranks that wait for it
	through []int // ranks that wait for those, and so on
}

// holders lists the holders, the most blocking first, and the cycles of ranks that wait only for each other, each once,
// in the order of the waits.
func (g *graph) holders() (hs []holder, cycles [][]int) {
	behind := map[int][]int{} // for each rank, the ranks that wait for it
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

// cycles returns the cycles of ranks that no holder blocks.
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

// columns are the table's headings. Numbers are aligned right.
var columns = []struct {
	name string
	side int // 1: right, -1: left
}{{"rank", 1}, {"host", -1}, {"pid", 1}, {"step", 1}, {"pass", -1}, {"layer", 1}, {"hop", 1}, {"operation", -1},
	{"waits for", -1}, {"bytes", 1}, {"s", 1}}

// Table returns one row for each rank, and below them lines that name the ranks that hold up others.
func Table(all []WaitState) string {
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b WaitState) int { return cmp.Compare(a.Rank, b.Rank) })
	g := newGraph(all)
	rows := [][]string{nil}
	for _, c := range columns {
		rows[0] = append(rows[0], c.name)
	}
	for i := range all {
		rows = append(rows, g.cells(&all[i]))
	}
	var b strings.Builder
	for _, line := range alignColumns(rows) {
		b.WriteString("  " + line + "\n")
	}
	for _, line := range g.blame() {
		b.WriteString("cprun: " + line + "\n")
	}
	return b.String()
}

// Row is one rank's account in words. A part is "" if unknown or absent.
type Row struct {
	Position
	Operation string        // the call that blocks it, or its own work
	WaitsFor  string        // ranks that have not reached that call: "0-2, 5"
	Waits     bool          // Operation is a call between ranks
	Known     bool          // it gave an account; otherwise Operation is why not
	Bytes     int64         // incomplete bytes of the call
	For       time.Duration // without progress of the call, or in its own work
}

// Rows returns each rank's activity, in the order of all. A waiting rank shows the first call that blocks it.
func Rows(all []WaitState) []Row {
	g := newGraph(all)
	rows := make([]Row, len(all))
	for i := range all {
		rows[i] = g.describe(&all[i])
	}
	return rows
}

// Blame returns lines that name the ranks that hold up others; none if no rank has waited for at least least.
func Blame(all []WaitState, least time.Duration) []string {
	long := func(s WaitState) bool { return len(s.Waits) > 0 && s.Waits[0].Stalled >= least }
	if !slices.ContainsFunc(all, long) {
		return nil
	}
	return newGraph(all).blame()
}

// describe returns a rank's row.
func (g *graph) describe(s *WaitState) Row {
	r := Row{Position: s.position(), Known: s.State == "", Operation: s.State}
	if !r.Known {
		return r
	}
	if len(s.Waits) == 0 {
		r.Operation, r.For = s.activity()
		return r
	}
	w := &s.Waits[0]
	r.Operation, r.Waits, r.Bytes, r.For = w.Op, true, w.Bytes, w.Stalled
	r.WaitsFor = ranges(g.awaited(s.Rank, s.Waits[:1]))
	return r
}

// cells returns the table's cells for a rank.
func (g *graph) cells(s *WaitState) []string {
	r := g.describe(s)
	row := []string{fmt.Sprint(s.Rank), s.Host, fmt.Sprint(s.PID), r.Step, r.Pass, r.Layer, r.Hop, r.Operation,
		r.WaitsFor, "", ""}
	if s.PID == 0 {
		row[2] = ""
	}
	if r.Waits {
		row[9] = readable.Count(r.Bytes)
	}
	if r.Known {
		row[10] = seconds(r.For)
	}
	return row
}

// alignColumns pads the columns. It drops empty columns and trailing spaces.
func alignColumns(rows [][]string) []string {
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
			if widths[i] > 0 {
				parts = append(parts, fmt.Sprintf("%*s", columns[i].side*widths[i], cmp.Or(text, "-")))
			}
		}
		lines = append(lines, strings.TrimRight(strings.Join(parts, "  "), " "))
	}
	return lines
}
