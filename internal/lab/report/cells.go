package report

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
)

var statusNames = map[experiment.Status]string{
	experiment.OK: "ok", experiment.Failed: "✗ failed", experiment.OutOfMemory: "✗ out of memory",
	experiment.Timeout: "✗ timeout", experiment.Refused: "✗ refused", experiment.Skipped: "skipped",
	experiment.Pending: "… not yet", experiment.Planned: "planned",
}

func status(c *experiment.Cell) cell {
	s, ok := statusNames[c.Status]
	if !ok {
		s = string(c.Status)
	}
	class := "bad"
	switch c.Status {
	case experiment.OK:
		class = "ok"
	case experiment.Skipped, experiment.Pending, experiment.Planned:
		class = "none"
	}
	return cell{Text: s, Class: class, Explain: c.Error}
}

// speedOf returns the measured tokens/s a device of a cell; NaN for none.
func speedOf(c *experiment.Cell) float64 {
	if c.Status == experiment.OK && c.TokensPerSecondPerDevice > 0 {
		return c.TokensPerSecondPerDevice
	}
	return math.NaN()
}

func (g *grid) matrix() *figure {
	t, skipped := g.table("Tokens a second and device of each cell, or its status", func(c *experiment.Cell) cell {
		field := status(c)
		if c.Status == experiment.Planned && c.PredictedStepSeconds > 0 {
			field.Text = readable.Seconds(c.PredictedStepSeconds) + " planned"
		}
		if s := speedOf(c); c.Status == experiment.OK && !math.IsNaN(s) {
			field.Text, field.Number = readable.Number(s), true
		}
		return field
	})
	f := &figure{Title: "Result of each cell", Kind: "table", Section: overview, Table: t,
		Caption: "Tokens a second and device, the median of the counted steps. The list below has the errors of cells " +
			"that failed.",
		Errors: g.errors()}
	if skipped > 0 {
		f.Caption += fmt.Sprintf(" %d rows with only skipped cells are left out.", skipped)
	}
	return f
}

func (g *grid) choices() *figure {
	t, _ := g.table("Backend, layout and recompute of each cell",
		func(c *experiment.Cell) cell { return text(c.Choices.String()) })
	if len(t.Rows) == 0 { // results of an older version have no choices
		t = nil
	}
	return &figure{Title: "Backend, layout and recompute", Kind: "table", Section: overview, Table: t,
		Caption: "attention.backend, parallel.layout and memory.recompute of each cell. If they differ, so may the speed, " +
			"for that reason alone."}
}

// table returns a table with a field for each cell. Its columns are the lengths, or else the axis with most values. It
// leaves out rows in which all cells were skipped, and returns their number as skipped.
func (g *grid) table(caption string, field func(*experiment.Cell) cell) (t *table, skipped int) {
	across := experiment.Axis{}
	for _, a := range g.axes {
		if a.Key == keyLength && len(a.Values) > 1 {
			across = a
			break
		}
		if len(a.Values) > len(across.Values) {
			across = a
		}
	}
	down := g.varying(across.Key)
	t = &table{Caption: caption, Columns: []string{"cell"}}
	for _, v := range across.Values {
		t.Columns = append(t.Columns, label(across.Key, v))
	}
	rows := map[string]int{}
	for i := range g.Cells {
		c := &g.Cells[i]
		name := cmp.Or(g.names(c, down), g.Name)
		row, ok := rows[name]
		if !ok {
			row = len(t.Rows)
			rows[name] = row
			t.Rows = append(t.Rows, append([]cell{{Text: name, Head: true}}, make([]cell, len(across.Values))...))
		}
		column := slices.IndexFunc(across.Values,
			func(v any) bool { return experiment.Text(v) == experiment.Text(g.value(c, across.Key)) })
		if column >= 0 {
			t.Rows[row][column+1] = field(c)
		}
	}
	skipped = len(t.Rows)
	t.Rows = slices.DeleteFunc(t.Rows, func(row []cell) bool {
		return !slices.ContainsFunc(row[1:],
			func(c cell) bool { return c.Text != "" && c.Text != statusNames[experiment.Skipped] })
	})
	skipped -= len(t.Rows)
	for i := range t.Rows {
		for k := range t.Rows[i] {
			if t.Rows[i][k].Text == "" {
				t.Rows[i][k] = cell{Text: "–", Class: "none"}
			}
		}
	}
	return t, skipped
}

var digits = regexp.MustCompile(`\d+(\.\d+)?`)

// errors lists the errors of the cells. Of errors that differ only in numbers, it lists the first and a count.
func (g *grid) errors() []string {
	type group struct {
		first string
		cells int
	}
	var all []*group
	seen := map[string]*group{}
	for _, c := range g.Cells {
		if c.Error == "" {
			continue
		}
		line := statusNames[c.Status] + ": " + c.Error
		key := digits.ReplaceAllString(line, "0")
		if seen[key] == nil {
			seen[key] = &group{first: line}
			all = append(all, seen[key])
		}
		seen[key].cells++
	}
	const most = 12
	var out []string
	for i, e := range all {
		if i == most {
			return append(out, fmt.Sprintf("and %d more kinds of errors, in the CSV", len(all)-most))
		}
		if e.cells > 1 {
			e.first += fmt.Sprintf(" (and %d more cells)", e.cells-1)
		}
		out = append(out, e.first)
	}
	return out
}

// headline returns the result of an experiment in one sentence: "24 cells: 22 ok, 2 out of memory; fastest: ring,
// 4 ranks, 6,300 tokens/s a device."
func (g *grid) headline() string {
	n := map[experiment.Status]int{}
	var fastest *experiment.Cell
	for i, c := range g.Cells {
		n[c.Status]++
		if x := speedOf(&c); !math.IsNaN(x) && (fastest == nil || x > speedOf(fastest)) {
			fastest = &g.Cells[i]
		}
	}
	var parts []string
	for _, s := range []experiment.Status{experiment.OK, experiment.OutOfMemory, experiment.Failed, experiment.Timeout,
		experiment.Refused, experiment.Skipped, experiment.Planned, experiment.Pending} {
		if n[s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[s], strings.TrimLeft(statusNames[s], "✗… ")))
		}
	}
	text := fmt.Sprintf("%d cells: %s", len(g.Cells), strings.Join(parts, ", "))
	if fastest != nil {
		text += fmt.Sprintf("; fastest: %s, %s tokens/s a device", cmp.Or(g.names(fastest, g.varying()), g.Name),
			readable.Number(speedOf(fastest)))
	}
	return text + "."
}

// best returns a table with the fastest cell for each length and number of ranks, and the extra time of others.
func (g *grid) best() *table {
	type group struct {
		name  string
		cells []*experiment.Cell
	}
	var groups []*group
	problem := []experiment.Axis{}
	for _, a := range g.axes {
		if slices.Contains([]string{keyLength, keyRanks, "base", "model.from", "device"}, a.Key) ||
			strings.HasPrefix(a.Key, "model.") {
			problem = append(problem, a)
		}
	}
	choice := slices.DeleteFunc(g.varying(), func(a experiment.Axis) bool {
		return slices.ContainsFunc(problem, func(b experiment.Axis) bool { return a.Key == b.Key })
	})
	for i := range g.Cells {
		c := &g.Cells[i]
		if math.IsNaN(speedOf(c)) {
			continue
		}
		name := g.names(c, problem)
		k := slices.IndexFunc(groups, func(o *group) bool { return o.name == name })
		if k < 0 {
			k, groups = len(groups), append(groups, &group{name: name})
		}
		groups[k].cells = append(groups[k].cells, c)
	}
	if len(groups) == 0 {
		return nil
	}
	t := &table{Caption: "The fastest cell of each problem",
		Columns: []string{"problem", "fastest", "backend, layout, recompute", "tokens/s", "tokens/s a device",
			"TFLOP/s a device", "MFU", "step", "memory", "waiting", "next best, time", "slowest, time"}}
	for _, o := range groups {
		slices.SortStableFunc(o.cells,
			func(a, b *experiment.Cell) int { return int(math.Copysign(1, speedOf(b)-speedOf(a))) })
		first, last := o.cells[0], o.cells[len(o.cells)-1]
		slower := func(c *experiment.Cell) cell {
			if c == first {
				return text("–")
			}
			return text(fmt.Sprintf("%s +%.1f %%", g.names(c, choice), 100*(speedOf(first)/speedOf(c)-1)))
		}
		next := first
		if len(o.cells) > 1 {
			next = o.cells[1]
		}
		t.Rows = append(t.Rows, []cell{{Text: cmp.Or(o.name, g.Name), Head: true},
			{Text: cmp.Or(g.names(first, choice), "–"), Class: "best"},
			text(first.Choices.String()), known(first.TokensPerSecond, readable.Number),
			known(first.TokensPerSecondPerDevice, readable.Number),
			known(first.TFLOPsPerDevice, readable.Number), known(first.MFU, readable.Percent), known(first.StepSeconds,
				readable.Seconds),
			known(float64(first.MemoryBytes), readable.Bytes[float64]),
			known(share(first), readable.Percent), slower(next), slower(last)})
	}
	t.drop()
	return t
}

func share(c *experiment.Cell) float64 {
	if c.CommWaitSeconds == nil || c.StepSeconds == 0 || c.Status != experiment.OK {
		return math.NaN()
	}
	return *c.CommWaitSeconds / c.StepSeconds
}

func (g *grid) csv() string {
	var out bytes.Buffer
	g.WriteCSV(&out) // a bytes.Buffer returns no errors
	return base64.StdEncoding.EncodeToString(out.Bytes())
}
