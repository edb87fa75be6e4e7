package report

import (
	"cmp"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
)

// Grid keys with special treatment in figures.
const (
	keyLength = "data.seq_len"
	keyRanks  = "ranks" // processes times nodes
)

const (
	overview    = "Overview"
	scaling     = "Throughput and scaling"
	memories    = "Memory"
	communicate = "Transfers"
	predictions = "Prediction"
)

type grid struct {
	*experiment.Results
	axes []experiment.Axis // nproc and nnodes merged into ranks
}

func (p *page) experiment(e *experiment.Results, plans map[string]*Plan) {
	g := newGrid(e)
	p.Facts = append(p.Facts, [][2]string{{"Command", e.Command}, {"Commit", e.Commit}, {"Machine", e.Machine},
		{"Begun", e.Created.UTC().Format("2006-01-02 15:04 UTC")}, {"Config", e.Base}}...)
	if len(e.Set) > 0 {
		var set []string
		for k, v := range e.Set {
			set = append(set, k+"="+experiment.Text(v))
		}
		slices.Sort(set)
		p.Facts = append(p.Facts, [2]string{"Set in all cells", strings.Join(set, ", ")})
	}
	p.Headline = append(p.Headline, g.headline())
	if t := g.best(); t != nil {
		p.Summary = append(p.Summary, t)
	}
	planned := slices.ContainsFunc(e.Cells, func(c experiment.Cell) bool { return c.Status == experiment.Planned })
	for _, f := range []*figure{
		g.matrix(), g.choices(), g.against(keyLength), g.strong(), g.weak(), g.others(), g.memory(),
		g.exposed(keyLength), g.roofline(plans), g.predicted(),
	} {
		if planned {
			f.Caption += " Planned cells show predictions, not measurements."
		}
		p.figure(f)
	}
	p.Files = append(p.Files, download{Name: e.Name + ".csv",
		Caption: "results.csv, as in the directory of the experiment",
		Link:    template.URL("data:text/csv;charset=utf-8;base64," + g.csv())})
}

func newGrid(e *experiment.Results) *grid {
	g := &grid{Results: e}
	ranks := experiment.Axis{Key: keyRanks}
	for _, a := range e.Grid {
		if a.Key != "nproc" && a.Key != "nnodes" {
			g.axes = append(g.axes, a)
		}
	}
	for i := range e.Cells {
		if n := g.ranks(&e.Cells[i]); !math.IsNaN(n) && !slices.Contains(ranks.Values, any(n)) {
			ranks.Values = append(ranks.Values, n)
		}
	}
	slices.SortFunc(ranks.Values, func(a, b any) int { return int(a.(float64) - b.(float64)) })
	if len(ranks.Values) > 0 {
		g.axes = append(g.axes, ranks)
	}
	return g
}

// ranks returns the processes of a cell; NaN if neither the grid nor --set gives their number.
func (g *grid) ranks(c *experiment.Cell) float64 {
	n, given := 1.0, false
	for _, key := range []string{"nproc", "nnodes"} {
		v, ok := c.Number(key)
		if !ok {
			set := experiment.Cell{Values: g.Set}
			v, ok = set.Number(key)
		}
		if ok {
			n, given = n*v, true
		}
	}
	if !given {
		return math.NaN()
	}
	return n
}

func (g *grid) value(c *experiment.Cell, key string) any {
	if key == keyRanks {
		return g.ranks(c)
	}
	return c.Values[key]
}

// number returns value as a number; NaN if it is not numeric.
func (g *grid) number(c *experiment.Cell, key string) float64 {
	if key == keyRanks {
		return g.ranks(c)
	}
	if n, ok := c.Number(key); ok {
		return n
	}
	return math.NaN()
}

func (g *grid) axis(key string) (a experiment.Axis, ok bool) {
	for _, a = range g.axes {
		if a.Key == key {
			return a, len(a.Values) > 1
		}
	}
	return a, false
}

// label formats a value of an axis: "ring", "128K tokens", "4 ranks", "train.micro_batch_size 2".
func label(key string, v any) string {
	n, number := v.(float64)
	if i, ok := v.(int); ok {
		n, number = float64(i), true
	}
	switch {
	case key == keyLength && number:
		return readable.Size(n) + " tokens"
	case key == keyRanks && n == 1:
		return "1 rank"
	case key == keyPerRank:
		return readable.Size(n) + " tokens a rank"
	case key == keyRanks:
		return fmt.Sprintf("%.0f ranks", n)
	case number || fmt.Sprintf("%T", v) == "bool":
		return key[strings.LastIndex(key, ".")+1:] + " " + experiment.Text(v)
	}
	return experiment.Text(v)
}

func axisOf(key string) axis {
	switch key {
	case keyLength:
		return axis{Name: "sequence length, tokens", Kind: "tokens", Log: true}
	case keyRanks:
		return axis{Name: "ranks", Kind: "ranks", Log: true}
	}
	return axis{Name: key}
}

// priority orders the axes for styling: the first gets colors, the second dashes, the rest separate panels.
var priority = []string{"parallel.algorithm", "attention.backend", "parallel.layout", "parallel.transport", "base",
	"model.from", "device"}

// varying returns the axes with more than one value, except the keys in not, by priority; numeric axes last.
func (g *grid) varying(not ...string) []experiment.Axis {
	rank := func(a experiment.Axis) int {
		if i := slices.Index(priority, a.Key); i >= 0 {
			return i
		}
		if _, word := a.Values[0].(string); word {
			return len(priority)
		}
		return len(priority) + 1
	}
	var axes []experiment.Axis
	for _, a := range g.axes {
		if len(a.Values) > 1 && !slices.Contains(not, a.Key) {
			axes = append(axes, a)
		}
	}
	slices.SortStableFunc(axes, func(a, b experiment.Axis) int { return rank(a) - rank(b) })
	return axes
}

// maxDashes limits the dash patterns of a chart to as many as a reader can distinguish.
const maxDashes = 4

// lines draws each cell as a point (x, y), with one line for each combination of the other axes. Each
// sequence length gets its own chart, since times of different lengths are not comparable. point also
// returns the spread as lo and hi; NaN means none.
func (g *grid) lines(not []string, point func(c *experiment.Cell) (x, y, lo, hi float64)) []panel {
	axes := g.varying(not...)
	sized := func(a experiment.Axis) bool { return a.Key == keyLength || a.Key == keyPerRank }
	var split []experiment.Axis // axes with one panel for each value
	if i := slices.IndexFunc(axes, sized); i >= 0 {
		split, axes = axes[i:i+1:i+1], slices.Delete(slices.Clone(axes), i, i+1)
	}
	if len(axes) > 1 && len(axes[1].Values) > maxDashes {
		axes, split = axes[:1], append(split, axes[1:]...)
	} else if len(axes) > 2 {
		axes, split = axes[:2], append(split, axes[2:]...)
	}
	var panels []panel
	for i := range g.Cells {
		c := &g.Cells[i]
		x, y, lo, hi := point(c)
		if math.IsNaN(x) || math.IsNaN(y) || math.IsInf(y, 0) || y == 0 {
			continue
		}
		s := g.series(c, axes)
		p := panelOf(&panels, g.names(c, split))
		p.place = g.places(c, split)
		into := lineOf(p, s)
		into.X, into.Y = append(into.X, number(x)), append(into.Y, number(y))
		into.Lo, into.Hi = append(into.Lo, number(lo)), append(into.Hi, number(hi))
	}
	for i := range panels {
		for k := range panels[i].Series {
			panels[i].Series[k].sort()
		}
	}
	g.order(panels)
	return panels
}

func (g *grid) series(c *experiment.Cell, axes []experiment.Axis) series {
	s := series{Name: cmp.Or(g.names(c, axes), "measured")}
	for i, a := range axes {
		n := int(place(a, g.value(c, a.Key)))
		if i == 0 {
			s.Color, s.Symbol = n, n
		}
		if i == len(axes)-1 {
			s.Dash = n
		}
	}
	return s
}

func (g *grid) names(c *experiment.Cell, axes []experiment.Axis) string {
	var names []string
	for _, a := range axes {
		names = append(names, label(a.Key, g.value(c, a.Key)))
	}
	return strings.Join(names, ", ")
}

func (g *grid) places(c *experiment.Cell, axes []experiment.Axis) (p []int) {
	for _, a := range axes {
		p = append(p, int(place(a, g.value(c, a.Key))))
	}
	return p
}

func (g *grid) order(panels []panel) {
	slices.SortStableFunc(panels, func(a, b panel) int { return slices.Compare(a.place, b.place) })
	for _, p := range panels {
		slices.SortStableFunc(p.Series, func(a, b series) int {
			return cmp.Or(a.Color-b.Color, a.Dash-b.Dash)
		})
	}
}

func panelOf(panels *[]panel, title string) *panel {
	for i := range *panels {
		if (*panels)[i].Title == title {
			return &(*panels)[i]
		}
	}
	*panels = append(*panels, panel{Title: title})
	return &(*panels)[len(*panels)-1]
}

func lineOf(p *panel, s series) *series {
	for i := range p.Series {
		if p.Series[i].Name == s.Name {
			return &p.Series[i]
		}
	}
	p.Series = append(p.Series, s)
	return &p.Series[len(p.Series)-1]
}

// sort orders the points by X. It drops Lo and Hi if no point has a spread.
func (s *series) sort() {
	order := make([]int, len(s.X))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(s.X[a], s.X[b]) })
	for _, list := range []*[]number{&s.X, &s.Y, &s.Lo, &s.Hi} {
		if len(*list) == len(order) {
			sorted := make([]number, len(order))
			for i, k := range order {
				sorted[i] = (*list)[k]
			}
			*list = sorted
		}
	}
	spread := slices.ContainsFunc(s.Lo, func(n number) bool { return !math.IsNaN(float64(n)) })
	if !spread {
		s.Lo, s.Hi = nil, nil
	}
}
