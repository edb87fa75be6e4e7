package report

import (
	"cmp"
	"html/template"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
)

// Grid keys with special treatment in figures.
const (
	keyLength  = "data.seq_len"
	keyRanks   = "ranks"         // processes times nodes
	keyPerRank = "tokens a rank" // sequence length over ranks
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
	cells   []*experiment.Cell // their values have keyRanks and keyPerRank, if known
	axes    []experiment.Axis  // nproc and nnodes merged into ranks
	perRank experiment.Axis
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
	if t := g.best(); len(t.Rows) > 0 {
		p.Summary = append(p.Summary, t)
	}
	planned := slices.ContainsFunc(e.Cells, func(c experiment.Cell) bool { return c.Status == experiment.Planned })
	for _, f := range g.figures(plans) {
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
	g := &grid{Results: e, perRank: experiment.Axis{Key: keyPerRank}}
	ranks := experiment.Axis{Key: keyRanks}
	for _, c := range e.Cells {
		values := map[string]any{}
		maps.Copy(values, e.Set)
		maps.Copy(values, c.Values)
		c.Values = values
		nproc, _ := c.Number("nproc")
		nnodes, _ := c.Number("nnodes")
		if nproc != 0 || nnodes != 0 {
			n := cmp.Or(nproc, 1) * cmp.Or(nnodes, 1)
			values[keyRanks], ranks.Values = n, append(ranks.Values, n)
			if length, ok := c.Number(keyLength); ok {
				values[keyPerRank], g.perRank.Values = length/n, append(g.perRank.Values, length/n)
			}
		}
		g.cells = append(g.cells, &c)
	}
	for _, a := range e.Grid {
		if a.Key != "nproc" && a.Key != "nnodes" {
			g.axes = append(g.axes, a)
		}
	}
	for _, a := range []*experiment.Axis{&ranks, &g.perRank} {
		slices.SortFunc(a.Values, func(a, b any) int { return cmp.Compare(a.(float64), b.(float64)) })
		a.Values = slices.Compact(a.Values)
	}
	if len(ranks.Values) > 0 {
		g.axes = append(g.axes, ranks)
	}
	return g
}

// numberOf returns a value of a cell; NaN if it is not a number.
func numberOf(c *experiment.Cell, key string) float64 {
	if n, ok := c.Number(key); ok {
		return n
	}
	return math.NaN()
}

// axis returns the first axis of some keys that has several values.
func (g *grid) axis(keys ...string) (experiment.Axis, bool) {
	for _, key := range keys {
		for _, a := range g.axes {
			if a.Key == key && len(a.Values) > 1 {
				return a, true
			}
		}
	}
	return experiment.Axis{}, false
}

// label formats a value of an axis: "ring", "128K tokens", "4 ranks", "train.micro_batch_size 2".
func label(key string, v any) string {
	n, number := v.(float64)
	if i, ok := v.(int); ok {
		n, number = float64(i), true
	}
	_, flag := v.(bool)
	switch {
	case !number && !flag:
		return experiment.Text(v)
	case key == keyLength:
		return readable.Size(n) + " tokens"
	case key == keyPerRank:
		return readable.Size(n) + " tokens a rank"
	case key == keyRanks:
		return readable.Counted(int(n), "rank")
	}
	return key[strings.LastIndex(key, ".")+1:] + " " + experiment.Text(v)
}

// axisOf returns the axis of a chart over a. Its values are words if no cell has a number.
func (g *grid) axisOf(a experiment.Axis) axis {
	switch {
	case a.Key == keyLength:
		return axis{Name: "sequence length, tokens", Kind: "tokens", Log: true}
	case a.Key == keyRanks:
		return axis{Name: "ranks", Kind: "ranks", Log: true}
	case slices.ContainsFunc(g.cells, func(c *experiment.Cell) bool { return !math.IsNaN(numberOf(c, a.Key)) }):
		return axis{Name: a.Key}
	}
	return axis{Name: a.Key, Kind: "text", Text: texts(a)}
}

func texts(a experiment.Axis) (all []string) {
	for _, v := range a.Values {
		if n, ok := v.(float64); ok && a.Key == keyLength {
			all = append(all, readable.Size(n))
			continue
		}
		all = append(all, experiment.Text(v))
	}
	return all
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
	axes := slices.DeleteFunc(slices.Clone(g.axes), func(a experiment.Axis) bool {
		return len(a.Values) < 2 || slices.Contains(not, a.Key)
	})
	slices.SortStableFunc(axes, func(a, b experiment.Axis) int { return rank(a) - rank(b) })
	return axes
}

// maxDashes limits the dash patterns of a chart to as many as a reader can distinguish.
const maxDashes = 4

// lines places a mark for each cell, in a series for each combination of the axes. Each sequence length gets its own
// panel, since times of different lengths are not comparable. It leaves out cells without a value.
func (g *grid) lines(axes []experiment.Axis, at func(c *experiment.Cell) mark) (marks []mark) {
	sized := func(a experiment.Axis) bool { return a.Key == keyLength || a.Key == keyPerRank }
	var split []experiment.Axis // axes with one panel for each value
	if i := slices.IndexFunc(axes, sized); i >= 0 {
		split, axes = append(split, axes[i]), slices.Delete(axes, i, i+1)
	}
	styled := min(2, len(axes))
	if styled == 2 && len(axes[1].Values) > maxDashes {
		styled = 1
	}
	split, axes = append(split, axes[styled:]...), axes[:styled]
	for _, c := range g.cells {
		m := at(c)
		if m.y == 0 || !finite(m.x) || !finite(m.y) {
			continue
		}
		m.panel, m.place, m.of.Name = names(c, split), places(c, split), cmp.Or(names(c, axes), "measured")
		if look := places(c, axes); len(look) > 0 {
			m.of.Color, m.of.Symbol, m.of.Dash = look[0], look[0], look[len(look)-1]
		}
		marks = append(marks, m)
	}
	slices.SortStableFunc(marks, func(a, b mark) int {
		return cmp.Or(slices.Compare(a.place, b.place), a.of.Color-b.of.Color, a.of.Dash-b.of.Dash,
			cmp.Compare(a.x, b.x))
	})
	return marks
}

func finite(x float64) bool { return !math.IsNaN(x - x) } // ∞ − ∞ is also NaN

// joined moves marks to one panel, in which only color distinguishes them. Words tell them apart.
func joined(marks []mark) []mark {
	for i := range marks {
		m := &marks[i]
		m.words = strings.TrimSuffix(m.of.Name+", "+m.panel, ", ")
		m.of.Name, _, _ = strings.Cut(m.of.Name, ",")
		m.panel, m.of.Kind, m.of.Dash = "", "points", 0
	}
	return marks
}

func names(c *experiment.Cell, axes []experiment.Axis) string {
	var names []string
	for _, a := range axes {
		names = append(names, label(a.Key, c.Values[a.Key]))
	}
	return strings.Join(names, ", ")
}

func places(c *experiment.Cell, axes []experiment.Axis) (p []int) {
	for _, a := range axes {
		p = append(p, place(a, c))
	}
	return p
}

// place returns the index of a cell's value on an axis; -1 for none.
func place(a experiment.Axis, c *experiment.Cell) int {
	return slices.IndexFunc(a.Values, func(v any) bool { return experiment.Text(v) == c.Text(a.Key) })
}
