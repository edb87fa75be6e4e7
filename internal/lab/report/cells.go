package report

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/lab/experiment"
)

// statuses describes the statuses of cells, in the order of the headline.
var statuses = []struct {
	status     experiment.Status
	text, mark string
	class      string
}{
	{experiment.OK, "ok", "", "ok"}, {experiment.OutOfMemory, "out of memory", "✗ ", "bad"},
	{experiment.Failed, "failed", "✗ ", "bad"}, {experiment.Timeout, "timeout", "✗ ", "bad"},
	{experiment.Refused, "refused", "✗ ", "bad"}, {experiment.Skipped, "skipped", "", "none"},
	{experiment.Planned, "planned", "", "none"}, {experiment.Pending, "not yet", "… ", "none"},
}

func status(c *experiment.Cell) cell {
	for _, s := range statuses {
		if s.status == c.Status {
			return cell{Text: s.mark + s.text, Class: s.class, Explain: c.Error}
		}
	}
	return cell{Text: string(c.Status), Class: "bad", Explain: c.Error}
}

// speedOf returns the measured tokens/s a device of a cell; 0 for none.
func speedOf(c *experiment.Cell) float64 {
	if c.Status != experiment.OK {
		return 0
	}
	return max(0, c.TokensPerSecondPerDevice)
}

// tables returns the result of each cell, and its choices.
func (g *grid) tables() (results, choices *figure) {
	t, skipped := g.table("Tokens a second and device of each cell, or its status", func(c *experiment.Cell) cell {
		field := status(c)
		if s := speedOf(c); s > 0 {
			field.Text, field.Number = readable.Number(s), true
		} else if c.Status == experiment.Planned && c.PredictedStepSeconds > 0 {
			field.Text = readable.Seconds(c.PredictedStepSeconds) + " planned"
		}
		return field
	})
	results = &figure{Title: "Result of each cell", Kind: "table", Section: overview, Table: t,
		Caption: "Tokens a second and device, the median of the counted steps. The list below has the errors of cells " +
			"that failed.",
		Errors: g.errors()}
	if skipped > 0 {
		results.Caption += fmt.Sprintf(" %d rows with only skipped cells are left out.", skipped)
	}
	choices = &figure{Title: "Backend, layout and recompute", Kind: "table", Section: overview,
		Caption: "attention.backend, parallel.layout and memory.recompute of each cell. If they differ, so may the speed, " +
			"for that reason alone."}
	t, _ = g.table("Backend, layout and recompute of each cell",
		func(c *experiment.Cell) cell { return text(c.Choices.String()) })
	if len(t.Rows) > 0 { // results of an older version have no choices
		choices.Table = t
	}
	return results, choices
}

// table returns a table with a field for each cell. Its columns are the lengths, or else the axis with most values. It
// leaves out rows in which all cells were skipped, and returns their number as skipped.
func (g *grid) table(caption string, field func(*experiment.Cell) cell) (t *table, skipped int) {
	across, ok := g.axis(keyLength)
	for _, a := range g.axes {
		if !ok && len(a.Values) > len(across.Values) {
			across = a
		}
	}
	down := g.varying(across.Key)
	t = &table{Caption: caption, Columns: []string{"cell"}}
	for _, v := range across.Values {
		t.Columns = append(t.Columns, label(across.Key, v))
	}
	name := func(c *experiment.Cell) string { return cmp.Or(names(c, down), g.Name) }
	for _, cells := range groups(g.cells, name) {
		row := slices.Repeat([]cell{{Text: "–", Class: "none"}}, len(t.Columns))
		row[0] = cell{Text: name(cells[0]), Head: true}
		shown := false
		for _, c := range cells {
			if f, column := field(c), place(across, c); column >= 0 && f.Text != "" {
				row[column+1] = f
				shown = shown || f.Text != "skipped"
			}
		}
		if shown {
			t.Rows = append(t.Rows, row)
		} else {
			skipped++
		}
	}
	return t, skipped
}

var digits = regexp.MustCompile(`\d+(\.\d+)?`)

// errors lists the errors of the cells. Of errors that differ only in numbers, it lists the first and a count.
func (g *grid) errors() (lines []string) {
	failed := slices.DeleteFunc(slices.Clone(g.cells), func(c *experiment.Cell) bool { return c.Error == "" })
	line := func(c *experiment.Cell) string { return status(c).Text + ": " + c.Error }
	kinds := groups(failed, func(c *experiment.Cell) string { return digits.ReplaceAllString(line(c), "0") })
	const most = 12
	for i, cells := range kinds {
		if i == most {
			return append(lines, fmt.Sprintf("and %d more kinds of errors, in the CSV", len(kinds)-most))
		}
		lines = append(lines, line(cells[0]))
		if len(cells) > 1 {
			lines[i] += fmt.Sprintf(" (and %d more cells)", len(cells)-1)
		}
	}
	return lines
}

// headline returns the result of an experiment in one sentence: "24 cells: 22 ok, 2 out of memory; most tokens/s:
// 25,200 (ring, 4 ranks); most a device: 9,000 (ring, 1 rank)." Skipped cells are no cells of it.
func (g *grid) headline() string {
	n := map[experiment.Status]int{}
	for _, c := range g.cells {
		n[c.Status]++
	}
	var parts []string
	for _, s := range statuses {
		if n[s.status] > 0 && s.status != experiment.Skipped {
			parts = append(parts, fmt.Sprintf("%d %s", n[s.status], s.text))
		}
	}
	text := readable.Counted(len(g.cells)-n[experiment.Skipped], "cell") + ": " + strings.Join(parts, ", ")
	if ran := g.ran(); len(ran) > 0 {
		name := func(c *experiment.Cell) string { return cmp.Or(names(c, g.varying()), g.Name) }
		total := func(a, b *experiment.Cell) int { return cmp.Compare(b.TokensPerSecond, a.TokensPerSecond) }
		all := slices.MinFunc(ran, total)
		one := slices.MinFunc(ran, faster)
		text += fmt.Sprintf("; most tokens/s: %s (%s)", readable.Number(all.TokensPerSecond), name(all))
		text += fmt.Sprintf("; most a device: %s (%s)", readable.Number(speedOf(one)), name(one))
	}
	return text + "."
}

// ran returns the cells with a speed.
func (g *grid) ran() []*experiment.Cell {
	return slices.DeleteFunc(slices.Clone(g.cells), func(c *experiment.Cell) bool { return speedOf(c) == 0 })
}

func faster(a, b *experiment.Cell) int { return cmp.Compare(speedOf(b), speedOf(a)) }

// best returns a table with the fastest cell for each length and number of ranks, and the extra time of others.
func (g *grid) best() *table {
	ofProblem := func(a experiment.Axis) bool {
		return slices.Contains([]string{keyLength, keyRanks, "base", "device"}, a.Key) || strings.HasPrefix(a.Key, "model.")
	}
	problem := slices.DeleteFunc(slices.Clone(g.axes), func(a experiment.Axis) bool { return !ofProblem(a) })
	choice := slices.DeleteFunc(g.varying(), ofProblem)
	name := func(c *experiment.Cell) string { return names(c, problem) }
	t := &table{Caption: "The fastest cell of each problem",
		Columns: []string{"problem", "fastest", "backend, layout, recompute", "tokens/s", "tokens/s a device",
			"TFLOP/s a device", "MFU", "step", "memory", "waiting", "next best, time", "slowest, time"}}
	for _, cells := range groups(g.ran(), name) {
		slices.SortStableFunc(cells, faster)
		c := cells[0]
		slower := func(other *experiment.Cell) cell {
			if other == c {
				return text("–")
			}
			return text(fmt.Sprintf("%s +%.1f %%", names(other, choice), 100*(speedOf(c)/speedOf(other)-1)))
		}
		t.Rows = append(t.Rows, []cell{{Text: cmp.Or(name(c), g.Name), Head: true},
			{Text: cmp.Or(names(c, choice), "–"), Class: "best"}, text(c.Choices.String()),
			known(c.TokensPerSecond, readable.Number), known(c.TokensPerSecondPerDevice, readable.Number),
			known(c.TFLOPsPerDevice, readable.Number), known(c.MFU, readable.Percent),
			known(c.StepSeconds, readable.Seconds), known(float64(c.MemoryBytes), readable.Bytes[float64]),
			known(share(c), readable.Percent), slower(cells[min(1, len(cells)-1)]), slower(cells[len(cells)-1])})
	}
	t.drop()
	return t
}

// share returns the share of a step in which compute waited for transfers; 0 if unknown.
func share(c *experiment.Cell) float64 {
	if c.CommWaitSeconds == nil || c.StepSeconds == 0 || c.Status != experiment.OK {
		return 0
	}
	return *c.CommWaitSeconds / c.StepSeconds
}

func (g *grid) csv() string {
	var out bytes.Buffer
	g.WriteCSV(&out) // a bytes.Buffer returns no errors
	return base64.StdEncoding.EncodeToString(out.Bytes())
}
