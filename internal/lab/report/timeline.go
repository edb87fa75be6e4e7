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
	kinds
)

var kindNames = [kinds]string{"other work", "attention", "waiting for another rank", "transfer"}

// A span is a piece of a step, or several joined pieces.
type span struct {
	metrics.Slice
	kind pieceKind
	from string // of a wait: the rank that sends
}

var fromRank = regexp.MustCompile(`from rank (\d+)`)

func kindOf(s metrics.Slice) (k pieceKind, ok bool) {
	switch {
	case s.Lane == "compute" && s.Name == "wait":
		return waiting, true
	case s.Lane == "compute" && strings.HasPrefix(s.Name, "attention"):
		return attention, true
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

func (p *page) timeline(r *Run) {
	spans, step, ranks := r.lastStep()
	if len(spans) == 0 {
		return
	}
	cut := ""
	shown := ranks[:min(len(ranks), maxLanes)]
	if r.Traced > len(shown) {
		cut = fmt.Sprintf(" The first %d of %d ranks are drawn.", len(shown), r.Traced)
	}
	f := &figure{Title: fmt.Sprintf("Step %d by rank%s", step, r.suffix), Kind: "rects", Section: timeline,
		Caption: "Each rank has a row for its computation and one for its transfers. A transfer below computation is " +
			"hidden. \"← 2\" is a wait for rank 2. Pieces too short to draw are joined with their neighbours and drawn " +
			"as the longest of them." + cut}
	f.Views = append(f.Views, timelineView("the whole step", spans, shown))
	for _, pass := range []string{"forward", "backward"} {
		if layer, ok := middle(spans, pass); ok {
			part := slices.DeleteFunc(slices.Clone(spans), func(s span) bool {
				return !strings.Contains("/"+s.Label+"/", "/"+pass+"/"+layer+"/")
			})
			f.Views = append(f.Views, timelineView(layer+", "+pass, part, shown))
		}
	}
	p.figure(f)
	p.figure(r.hopTimes(spans, shown, step))
	p.figure(r.waitsFor(spans, shown, step))
}

// lastStep returns the newest step that is in the trace of every rank, sorted by time; times begin at 0.
func (r *Run) lastStep() (spans []span, step int, ranks []int) {
	newest := map[int]int{}
	for _, s := range r.Slices {
		if n, ok := stepOf(s.Label); ok {
			newest[s.Rank] = max(newest[s.Rank], n)
		}
	}
	ranks = slices.Sorted(maps.Keys(newest))
	if step = -1; len(ranks) > 0 {
		step = slices.Min(slices.Collect(maps.Values(newest)))
	}
	begin := 0.0
	for _, s := range r.Slices {
		n, ok := stepOf(s.Label)
		kind, drawn := kindOf(s)
		if !ok || n != step || !drawn {
			continue
		}
		sp := span{Slice: s, kind: kind}
		if m := fromRank.FindStringSubmatch(s.Detail); m != nil && kind == waiting {
			sp.from = m[1]
		}
		if len(spans) == 0 || s.Start < begin {
			begin = s.Start
		}
		spans = append(spans, sp)
	}
	for i := range spans {
		spans[i].Start -= begin
	}
	slices.SortStableFunc(spans, func(a, b span) int { return cmp.Compare(a.Start, b.Start) })
	return spans, step, ranks
}

var layerPart = regexp.MustCompile(`^(?:.*/)?(forward|backward)/(layer \d+)(?:/|$)`)

// middle returns the middle layer of a pass.
func middle(spans []span, pass string) (string, bool) {
	var layers []string
	for _, s := range spans {
		if m := layerPart.FindStringSubmatch(s.Label); m != nil && m[1] == pass && !slices.Contains(layers, m[2]) {
			layers = append(layers, m[2])
		}
	}
	if len(layers) == 0 {
		return "", false
	}
	return layers[len(layers)/2], true
}

// timelineView draws spans in two rows for each rank. It joins short pieces until at most maxWork remain.
func timelineView(name string, spans []span, ranks []int) view {
	v := view{Name: name, X: axis{Name: "time", Kind: "seconds"}, Y: axis{Kind: "text"}, Panels: []panel{{}}}
	spans = slices.DeleteFunc(slices.Clone(spans), func(s span) bool { return !slices.Contains(ranks, s.Rank) })
	begin, end := 0.0, 0.0
	for i, s := range spans {
		if i == 0 || s.Start < begin {
			begin = s.Start
		}
		end = max(end, s.Start+s.Took)
	}
	for _, r := range ranks {
		v.Y.Text = append(v.Y.Text, fmt.Sprintf("rank %d", r), "transfers")
	}
	all := make([]series, kinds)
	words := make([]map[string]int, kinds)
	for k := range all {
		all[k] = series{Name: kindNames[k], Kind: "rects", Color: k - 1} // -1: muted
		words[k] = map[string]int{}
	}
	rows := byRow(spans, ranks)
	var pieces [][]span
	for least := (end - begin) / 4000; ; least *= 2 {
		n := 0
		pieces = pieces[:0]
		for _, row := range rows {
			pieces = append(pieces, join(row, least))
			n += len(pieces[len(pieces)-1])
		}
		if n <= maxWork || least >= end-begin {
			break
		}
	}
	for row, list := range pieces {
		for _, s := range list {
			k := &all[s.kind]
			k.X, k.X2, k.Y = append(k.X, number(s.Start-begin)), append(k.X2, number(s.Start-begin+s.Took)), append(k.Y,
				number(row))
			k.label(s.words(), words[s.kind])
		}
	}
	for _, s := range all {
		if len(s.X) > 0 {
			v.Panels[0].Series = append(v.Panels[0].Series, s)
		}
	}
	return v
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

func byRow(spans []span, ranks []int) [][]span {
	rows := make([][]span, 2*len(ranks))
	for _, s := range spans {
		row := 2 * slices.Index(ranks, s.Rank)
		if s.kind == transfer {
			row++
		}
		rows[row] = append(rows[row], s)
	}
	return rows
}

// join returns the spans of a row as pieces of at least about that length. It joins shorter spans to one with the kind
// and the words of the longest, and neighbours with equal words.
func join(row []span, least float64) []span {
	var out, short []span
	put := func(s span) {
		if n := len(out) - 1; n >= 0 && out[n].kind == s.kind && out[n].from == s.from &&
			hopOf(out[n].Label) == hopOf(s.Label) && s.Start-(out[n].Start+out[n].Took) <= least/4 {
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
		if s.Took >= least {
			flush()
			put(s)
			continue
		}
		short = append(short, s)
	}
	flush()
	return out
}

// hopOf returns the part "hop 1" or "gradients home" of a label; "" if it has none.
func hopOf(label string) string {
	for part := range strings.SplitSeq(label, "/") {
		switch f := strings.Fields(part); {
		case len(f) > 1 && f[0] == "hop":
			return "hop " + f[1]
		case part == "gradients home":
			return part
		}
	}
	return ""
}

func (r *Run) hopTimes(spans []span, ranks []int, step int) *figure {
	f := &figure{Title: fmt.Sprintf("Time by rank and hop of step %d%s", step, r.suffix), Kind: "heat",
		Section: timeline,
		Caption: "Seconds over all layers, forward and backward. If one rank has slow attention, others show it as " +
			"waiting."}
	for _, kind := range []pieceKind{attention, waiting} {
		took := map[[2]int]float64{}
		var columns []string
		for _, s := range spans {
			if hop, row := hopOf(s.Label), slices.Index(ranks, s.Rank); s.kind == kind && hop != "" && row >= 0 {
				if !slices.Contains(columns, hop) && len(columns) < maxRanks {
					columns = append(columns, hop)
				}
				if col := slices.Index(columns, hop); col >= 0 {
					took[[2]int{row, col}] += s.Took
				}
			}
		}
		f.Views = append(f.Views, heatView(kindNames[kind], "hop", "seconds", columns, nameRanks(ranks), took))
	}
	return f
}

func (r *Run) waitsFor(spans []span, ranks []int, step int) *figure {
	took := map[[2]int]float64{}
	for _, s := range spans {
		if from, err := strconv.Atoi(s.from); err == nil {
			if row, col := slices.Index(ranks, s.Rank), slices.Index(ranks, from); row >= 0 && col >= 0 {
				took[[2]int{row, col}] += s.Took
			}
		}
	}
	return &figure{Title: fmt.Sprintf("Who waited for whom in step %d%s", step, r.suffix), Kind: "heat",
		Section: timeline,
		Caption: "Seconds in which the rank of the row waited for keys, values or gradients from the rank of the " +
			"column. Waits in collectives have no single sender and are not shown.",
		Views: []view{heatView("seconds", "waited for", "seconds", nameRanks(ranks), nameRanks(ranks), took)}}
}

func nameRanks(ranks []int) (names []string) {
	for _, r := range ranks {
		names = append(names, fmt.Sprintf("rank %d", r))
	}
	return names
}

// heatView returns a matrix of values by row and column. Missing values are 0.
func heatView(name, x, kind string, columns, rows []string, values map[[2]int]float64) view {
	s := series{Name: name, Kind: "heat"}
	if len(values) > 0 {
		for row := range rows {
			for col := range columns {
				s.X, s.Y, s.Lo = append(s.X, number(col)), append(s.Y, number(row)),
					append(s.Lo, number(values[[2]int{row, col}]))
			}
		}
	}
	return view{Name: name, X: axis{Name: x, Kind: "text", Text: columns}, Y: axis{Name: "rank", Kind: "text",
		Text: rows}, Panels: []panel{{Title: kind, Series: []series{s}}}}
}
