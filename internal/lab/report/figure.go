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
}

// A series is one line, kind of bar, or kind of rectangle. Color, Dash and Symbol index the lists of series.js. Two
// series that differ in color also differ in dash or symbol.
type series struct {
	Name   string   `json:"name"`
	Kind   string   `json:"kind,omitempty"` // "" a line, points, bar, stack, ideal (a line without points), rects, heat
	Color  int      `json:"color"`
	Dash   int      `json:"dash"`
	Symbol int      `json:"symbol"`
	Run    int      `json:"run,omitempty"` // n > 0: X is the Steps of run n-1
	X      []number `json:"xs,omitempty"`
	Y      []number `json:"ys"`
	Lo     []number `json:"lo,omitempty"` // spread of Y, or the values of a heat map
	Hi     []number `json:"hi,omitempty"`
	X2     []number `json:"x2,omitempty"` // ends of rectangles, which begin at X
	Words  []string `json:"words,omitempty"`
	Text   []int    `json:"text,omitempty"` // for each point an index into Words
}

// A mark is one point, bar, rectangle or cell of a heat map.
type mark struct {
	of     series // its name and look
	panel  string // title of its panel
	place  []int  // of the panel among others, for sorting
	x, y   float64
	lo, hi float64 // spread of y; 0: unknown. In a heat map lo is the value.
	x2     float64 // end of a rectangle
	words  string
}

func (m mark) title() string { return m.panel }

func (m mark) name() string { return m.of.Name }

// draw makes panels and series of marks, in order of appearance.
func draw(marks []mark) (panels []panel) {
	for _, shown := range groups(marks, mark.title) {
		p := panel{Title: shown[0].panel}
		for _, list := range groups(shown, mark.name) {
			p.Series = append(p.Series, list[0].of.with(list))
		}
		panels = append(panels, p)
	}
	return panels
}

// with returns a series with the values of marks.
func (s series) with(marks []mark) series {
	known := map[string]int{}
	spread := slices.ContainsFunc(marks, func(m mark) bool { return m.lo > 0 && m.hi > 0 })
	unknown := func(x float64) number {
		if x == 0 {
			x = math.NaN()
		}
		return number(x)
	}
	for _, m := range marks {
		s.X, s.Y = append(s.X, number(m.x)), append(s.Y, number(m.y))
		switch {
		case s.Kind == "heat":
			s.Lo = append(s.Lo, number(m.lo))
		case s.Kind == "rects":
			s.X2 = append(s.X2, number(m.x2))
		case spread:
			s.Lo, s.Hi = append(s.Lo, unknown(m.lo)), append(s.Hi, unknown(m.hi))
		}
		if s.Kind != "rects" && m.words == "" {
			continue
		}
		i, ok := known[m.words]
		if !ok {
			i, known[m.words] = len(s.Words), len(s.Words)
			s.Words = append(s.Words, m.words)
		}
		s.Text = append(s.Text, i)
	}
	return s
}

// ideal returns a thin line without points through (xy[0], xy[1]), (xy[2], xy[3]), and so on.
func ideal(of series, panel string, xy ...float64) (marks []mark) {
	of.Kind = "ideal"
	for at := range slices.Chunk(xy, 2) {
		marks = append(marks, mark{of: of, panel: panel, x: at[0], y: at[1]})
	}
	return marks
}

// heat returns a view of values by rank and column. Missing ones are 0; without any it is empty.
func heat(name, x, kind string, columns []string, ranks []int, values map[[2]int]float64) view {
	var marks []mark
	for row := range ranks {
		for col := range columns {
			marks = append(marks, mark{of: series{Name: name, Kind: "heat"}, panel: kind, x: float64(col),
				y: float64(row), lo: values[[2]int{row, col}]})
		}
	}
	if len(values) == 0 {
		marks = nil
	}
	return view{name, axis{Name: x, Kind: "text", Text: columns}, ranksAxis(ranks), draw(marks)}
}

// groups splits items by a key, in order of appearance.
func groups[T any](items []T, key func(T) string) (all [][]T) {
	at := map[string]int{}
	for _, item := range items {
		k := key(item)
		i, ok := at[k]
		if !ok {
			i, all = len(all), append(all, nil)
			at[k] = i
		}
		all[i] = append(all[i], item)
	}
	return all
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

// figure adds a figure, if it shows anything, without empty panels and views.
func (p *page) figure(f *figure) {
	for i := range f.Views {
		f.Views[i].Panels = slices.DeleteFunc(f.Views[i].Panels, func(p panel) bool {
			return !slices.ContainsFunc(p.Series, func(s series) bool { return s.Kind != "ideal" })
		})
	}
	f.Views = slices.DeleteFunc(f.Views, func(v view) bool { return len(v.Panels) == 0 })
	if len(f.Views) == 0 && f.Table == nil {
		return
	}
	f.Caption = strings.ReplaceAll(f.Caption, " %", "\u00a0%")
	f.ID = fmt.Sprintf("figure-%d", len(p.Figures)+1)
	p.Figures = append(p.Figures, f)
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
