package report

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/model/metrics"
)

const (
	maxLanes = 16    // ranks of a timeline: 32 rows
	maxWork  = 12000 // rectangles of a view
)

// A pieceKind is a kind of piece in a trace, with its own look.
type pieceKind int

const (
	compute pieceKind = iota
	attention
	waiting
	transfer
	rule
	kinds
)

var kindNames = [kinds]string{"other work", "attention", "waiting for another rank", "transfer", "delta rule"}

// A span is a piece of a step, or several joined pieces.
type span struct {
	metrics.Slice
	kind             pieceKind
	from             string // of a wait: the rank that sends
	pass, layer, hop string // parts of the label, such as "forward", "layer 3" and "hop 1"; "" for none
}

var fromRank = regexp.MustCompile(`from rank (\d+)`)

func kindOf(s metrics.Slice) (k pieceKind, ok bool) {
	switch {
	case s.Lane == "compute" && s.Name == "wait":
		return waiting, true
	case s.Lane == "compute" && strings.HasPrefix(s.Name, "attention"):
		return attention, true
	case s.Lane == "compute" && strings.HasPrefix(s.Name, "delta "):
		return rule, true
	case s.Lane == "compute":
		return compute, true
	case strings.Contains(s.Lane, "comm") && s.Name != "wait":
		return transfer, true
	}
	return 0, false
}

// stepOf returns the step in a label such as "step 2/forward/layer 0". ok is false for other labels.
func stepOf(label string) (n int, ok bool) {
	first, _, _ := strings.Cut(label, "/")
	rest, ok := strings.CutPrefix(first, "step ")
	n, err := strconv.Atoi(rest)
	return n, ok && err == nil
}

func newSpan(s metrics.Slice, kind pieceKind) span {
	sp := span{Slice: s, kind: kind, hop: hopOf(s.Label)}
	for part := range strings.SplitSeq(s.Label, "/") {
		switch {
		case part == "forward" || part == "backward":
			sp.pass = part
		case strings.HasPrefix(part, "layer ") && sp.pass != "":
			sp.layer = part
		}
	}
	if m := fromRank.FindStringSubmatch(s.Detail); m != nil && kind == waiting {
		sp.from = m[1]
	}
	return sp
}

var hopPart = regexp.MustCompile(
	`(?:^|/)(hop \d+|gradients home|delta rule|states round \d+|halo gradients|halo)(?: |/|$)`)

// hopOf returns the part of a label that names a hop of attention or a part of a layer with a state; "" if it has none.
func hopOf(label string) string {
	if m := hopPart.FindStringSubmatch(label); m != nil {
		return m[1]
	}
	return ""
}

func (p *page) timeline(r *Run) {
	spans, step, ranks := r.lastStep()
	if len(spans) == 0 {
		return
	}
	f := &figure{Title: fmt.Sprintf("Step %d by rank%s", step, r.suffix), Kind: "rects", Section: timeline,
		Caption: "Each rank has a row for its computation and one for its transfers. A transfer below computation is " +
			"hidden. \"← 2\" is a wait for rank 2. Pieces too short to draw are joined with their neighbours and drawn " +
			"as the longest of them."}
	if r.Traced > len(ranks) {
		f.Caption += fmt.Sprintf(" The first %d of %d ranks are drawn.", len(ranks), r.Traced)
	}
	f.Views = append(f.Views, timelineView("the whole step", spans, ranks))
	for _, pass := range []string{"forward", "backward"} {
		ofPass := slices.DeleteFunc(slices.Clone(spans), func(s span) bool { return s.pass != pass || s.layer == "" })
		if layers := groups(ofPass, func(s span) string { return s.layer }); len(layers) > 0 {
			middle := layers[len(layers)/2]
			f.Views = append(f.Views, timelineView(middle[0].layer+", "+pass, middle, ranks))
		}
	}
	p.figure(f)
	p.figure(&figure{Title: fmt.Sprintf("Time by rank and hop of step %d%s", step, r.suffix), Kind: "heat",
		Section: timeline,
		Caption: "Seconds over all layers, forward and backward. If one rank has slow attention, others show it as " +
			"waiting.",
		Views: []view{hopTimes(attention, spans, ranks), hopTimes(rule, spans, ranks),
			hopTimes(waiting, spans, ranks)}})
	p.figure(&figure{Title: fmt.Sprintf("Who waited for whom in step %d%s", step, r.suffix), Kind: "heat",
		Section: timeline,
		Caption: "Seconds in which the rank of the row waited for keys, values, states or gradients from the rank of " +
			"the column. Waits in collectives have no single sender and are not shown.",
		Views: []view{waitsFor(spans, ranks)}})
}

// lastStep returns the newest step that is in the trace of every rank, sorted by time; times begin at 0.
func (r *Run) lastStep() (spans []span, step int, ranks []int) {
	newest := map[int]int{}
	for _, s := range r.Slices {
		if n, ok := stepOf(s.Label); ok {
			newest[s.Rank] = max(newest[s.Rank], n)
		}
	}
	if len(newest) == 0 {
		return nil, 0, nil
	}
	step = slices.Min(slices.Collect(maps.Values(newest)))
	for _, s := range r.Slices {
		n, ok := stepOf(s.Label)
		if kind, drawn := kindOf(s); ok && drawn && n == step {
			spans = append(spans, newSpan(s, kind))
		}
	}
	slices.SortStableFunc(spans, func(a, b span) int { return cmp.Compare(a.Start, b.Start) })
	for i := len(spans) - 1; i >= 0; i-- {
		spans[i].Start -= spans[0].Start
	}
	return spans, step, slices.Sorted(maps.Keys(newest))
}

// timelineView draws spans in two rows for each rank. It joins short pieces until at most maxWork remain.
func timelineView(name string, spans []span, ranks []int) view {
	y := axis{Kind: "text"}
	for _, r := range ranks {
		y.Text = append(y.Text, fmt.Sprintf("rank %d", r), "transfers")
	}
	rows := make([][]span, len(y.Text))
	begin, end := spans[0].Start, 0.0
	for _, s := range spans {
		row := 2 * slices.Index(ranks, s.Rank)
		if s.kind == transfer {
			row++
		}
		rows[row], end = append(rows[row], s), max(end, s.Start+s.Took)
	}
	var marks []mark
	for least := (end - begin) / 4000; ; least *= 2 {
		marks = marks[:0]
		for row := range rows {
			for _, s := range join(rows[row], least) {
				of := series{Name: kindNames[s.kind], Kind: "rects", Color: int(s.kind) - 1} // -1: muted
				marks = append(marks, mark{of: of, x: s.Start - begin, x2: s.Start - begin + s.Took, y: float64(row),
					words: s.words()})
			}
		}
		if len(marks) <= maxWork || least >= end-begin {
			break
		}
	}
	slices.SortStableFunc(marks, func(a, b mark) int { return a.of.Color - b.of.Color })
	return view{name, axis{Name: "time", Kind: "seconds"}, y, draw(marks)}
}

func (s span) words() string {
	_, where, _ := strings.Cut(s.Label, "/")
	where = strings.ReplaceAll(where, "/", ", ")
	what := s.Name
	switch {
	case s.kind == waiting && s.from != "":
		what = "waits for rank " + s.from
	case s.kind == waiting:
		what = "waits for " + s.Detail
	case s.kind == transfer && s.Detail != "":
		what += ", " + s.Detail
	}
	if where != "" {
		what += " (" + where + ")"
	}
	return what
}

// join returns the spans of a row as pieces of at least about that length. It joins shorter spans to one with the kind
// and the words of the longest, and neighbours with equal words.
func join(row []span, least float64) []span {
	var out, short []span
	put := func(s span) {
		if n := len(out) - 1; n >= 0 && out[n].kind == s.kind && out[n].from == s.from &&
			out[n].hop == s.hop && s.Start-(out[n].Start+out[n].Took) <= least/4 {
			out[n].Took = s.Start + s.Took - out[n].Start
			return
		}
		out = append(out, s)
	}
	flush := func() {
		if len(short) == 0 {
			return
		}
		var took [kinds]float64
		for _, s := range short {
			took[s.kind] += s.Took
		}
		most := short[0]
		for _, s := range short {
			if took[s.kind] > took[most.kind] || s.kind == most.kind && s.Took > most.Took {
				most = s
			}
		}
		last := short[len(short)-1]
		most.Start, most.Took = short[0].Start, last.Start+last.Took-short[0].Start
		put(most)
		short = short[:0]
	}
	for _, s := range row {
		if len(short) > 0 && s.Start+s.Took-short[0].Start > least {
			flush()
		}
		if short = append(short, s); s.Took >= least {
			flush()
		}
	}
	flush()
	return out
}

// hopTimes draws the seconds of one kind of work by rank and hop.
func hopTimes(kind pieceKind, spans []span, ranks []int) view {
	spans = slices.DeleteFunc(slices.Clone(spans), func(s span) bool { return s.kind != kind || s.hop == "" })
	var columns []string
	for _, hop := range groups(spans, func(s span) string { return s.hop }) {
		columns = append(columns, hop[0].hop)
	}
	columns = columns[:min(len(columns), maxRanks)]
	return times(kindNames[kind], "hop", spans, ranks, columns, func(s span) string { return s.hop })
}

// waitsFor draws the seconds in which the rank of the row waited for the rank of the column.
func waitsFor(spans []span, ranks []int) view {
	column := func(s span) string { return "rank " + s.from }
	return times("seconds", "waited for", spans, ranks, ranksAxis(ranks).Text, column)
}

// times draws the seconds of spans by rank and column. It leaves out spans of other columns.
func times(name, x string, spans []span, ranks []int, columns []string, column func(span) string) view {
	took := map[[2]int]float64{}
	for _, s := range spans {
		if col := slices.Index(columns, column(s)); col >= 0 {
			took[[2]int{slices.Index(ranks, s.Rank), col}] += s.Took
		}
	}
	return heat(name, x, "seconds", columns, ranks, took)
}
