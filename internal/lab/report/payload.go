package report

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"strconv"
	"strings"
)

type page struct {
	Title   string    `json:"title"`
	Figures []*figure `json:"figures"`
	// Steps holds the x values of each run: tokens, steps and hours.
	Steps [][3][]number `json:"steps,omitempty"`

	Headline []string      `json:"-"` // the results, a sentence for each run or experiment
	Facts    [][2]string   `json:"-"` // command, commit, machine, ...
	Summary  []*table      `json:"-"`
	Configs  []namedConfig `json:"-"`
	Notes    []string      `json:"-"`
	Files    []download    `json:"-"`
}

// A figure holds a chart and its text. The page shows the first view first.
type figure struct {
	ID      string   `json:"id"`
	Title   string   `json:"title"`
	Kind    string   `json:"kind"`               // lines, bars, rects or heat
	Smooth  bool     `json:"smooth,omitempty"`   // offers a moving mean
	BySteps bool     `json:"by_steps,omitempty"` // the reader chooses X among Steps
	Views   []view   `json:"views"`
	Section string   `json:"-"`
	Caption string   `json:"-"` // how to read it
	Table   *table   `json:"-"` // shown in place of a chart
	Errors  []string `json:"-"` // listed below it
}

// A view shows a figure in one way; buttons choose among several.
type view struct {
	Name   string  `json:"name"`
	X      axis    `json:"x"`
	Y      axis    `json:"y"`
	Panels []panel `json:"panels"`
}

// An axis is one direction of a chart. Kind selects the format of numbers.
type axis struct {
	Name string   `json:"name"`
	Kind string   `json:"kind"` // number, tokens, bytes, seconds, share, text
	Log  bool     `json:"log,omitempty"`
	Text []string `json:"text,omitempty"` // labels of an axis of kind text
	Zero bool     `json:"zero,omitempty"` // begins at 0
	Max  number   `json:"max,omitempty"`  // upper bound of its end; 0: the end of the data
}

// A panel is one chart of a view; the charts of a view share their axes.
type panel struct {
	Title  string   `json:"title"`
	Series []series `json:"series"`
	place  []int    // of its values on the grid's axes, to sort by
}

// A series is one line, kind of bar, or kind of rectangle. Color, Dash and Symbol index the lists of series.js. Two
// series that differ in color also differ in dash or symbol.
type series struct {
	Name   string   `json:"name"`
	Kind   string   `json:"kind,omitempty"` // "" a line, points, bar, ideal (a thin line without points), rects, heat
	Color  int      `json:"color"`
	Dash   int      `json:"dash"`
	Symbol int      `json:"symbol"`
	Run    int      `json:"run,omitempty"` // n > 0: X is the Steps of run n-1
	X      []number `json:"xs,omitempty"`
	Y      []number `json:"ys"`
	Lo     []number `json:"lo,omitempty"` // spread of Y
	Hi     []number `json:"hi,omitempty"`
	X2     []number `json:"x2,omitempty"` // ends of rectangles, which begin at X
	Words  []string `json:"words,omitempty"`
	Text   []int    `json:"text,omitempty"` // for each point an index into Words
}

// label gives the next point its words. known holds the indices of Words.
func (s *series) label(words string, known map[string]int) {
	i, ok := known[words]
	if !ok {
		i = len(s.Words)
		known[words] = i
		s.Words = append(s.Words, words)
	}
	s.Text = append(s.Text, i)
}

func (s *series) add(x, y float64) {
	if !math.IsNaN(x-x) && !math.IsNaN(y-y) { // ∞ − ∞ is also NaN
		s.X, s.Y = append(s.X, number(x)), append(s.Y, number(y))
	}
}

// A number marshals with seven digits, or all if it is whole. NaN and infinities become null.
type number float64

// MarshalJSON returns the JSON of n.
func (n number) MarshalJSON() ([]byte, error) {
	x := float64(n)
	switch {
	case math.IsNaN(x) || math.IsInf(x, 0):
		return []byte("null"), nil
	case x == math.Trunc(x) && math.Abs(x) < 1<<53:
		return strconv.AppendInt(nil, int64(x), 10), nil
	}
	return strconv.AppendFloat(nil, x, 'g', 7, 64), nil
}

type table struct {
	Caption string
	Columns []string
	Rows    [][]cell
}

type cell struct {
	Text    string
	Number  bool
	Head    bool   // names its row
	Class   string // of the style: ok, bad, none, best
	Explain string // tooltip
}

func text(s string) cell { return cell{Text: s} }

// A download is a file in the page. Its link is made here and needs no escaping.
type download struct {
	Name, Caption string
	Link          template.URL
}

func (p *page) figure(f *figure) {
	kept := f.Views[:0]
	for _, v := range f.Views {
		if v.any() {
			kept = append(kept, v)
		}
	}
	f.Views = kept
	if len(f.Views) == 0 && f.Table == nil {
		return
	}
	f.Caption = strings.ReplaceAll(f.Caption, " %", "\u00a0%")
	f.ID = fmt.Sprintf("figure-%d", len(p.Figures)+1)
	p.Figures = append(p.Figures, f)
}

// any removes empty panels and reports whether any remain.
func (v *view) any() bool {
	kept := v.Panels[:0]
	for _, p := range v.Panels {
		n := 0
		for _, s := range p.Series {
			if s.Kind != "ideal" {
				n += s.points()
			}
		}
		if n > 0 {
			kept = append(kept, p)
		}
	}
	v.Panels = kept
	return len(kept) > 0
}

func (s *series) points() (n int) {
	for _, y := range s.Y {
		if !math.IsNaN(float64(y)) && !math.IsInf(float64(y), 0) {
			n++
		}
	}
	return n
}

// Numeric reports whether a column holds numbers, which are right-aligned.
func (t *table) Numeric(column int) bool {
	return len(t.Rows) > 0 && column < len(t.Rows[0]) && t.Rows[0][column].Number
}

// drop removes columns without any value.
func (t *table) drop() {
	for i := len(t.Columns) - 1; i > 0; i-- {
		if slices.ContainsFunc(t.Rows, func(row []cell) bool { return row[i].Text != "" && row[i].Text != "–" }) {
			continue
		}
		t.Columns = slices.Delete(t.Columns, i, i+1)
		for k := range t.Rows {
			t.Rows[k] = slices.Delete(t.Rows[k], i, i+1)
		}
	}
}

// known returns a cell with f(x), or a dash for 0, NaN and infinities.
func known(x float64, f func(float64) string) cell {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return cell{Text: "–", Number: true}
	}
	return cell{Text: f(x), Number: true}
}
