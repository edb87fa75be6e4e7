package experiment

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
)

// A column shows a field of a cell, with its unit as a factor.
type column struct {
	head, field string
	factor      float64
}

// shown lists the columns of Table after the keys of the grid.
var shown = []column{
	{"backend", "backend", 0}, {"layout", "layout", 0}, {"recompute", "recompute", 0}, {"status", "status", 0},
	{"step s", "step_seconds", 1}, {"min", "step_seconds_min", 1}, {"max", "step_seconds_max", 1},
	{"predicted s", "predicted_step_seconds", 1}, {"tok/s", perSecond, 1},
	{"TFLOP/s a device", "tflops_per_device", 1}, {"MFU %", "mfu", 100}, {"GiB", "memory_bytes", 1.0 / (1 << 30)},
	{"planned GiB", "planned_memory_bytes", 1.0 / (1 << 30)}, {"wait ms", "comm_wait_seconds", 1e3},
}

const perSecond = "tokens_per_second"

// Table returns the results for a terminal: the cells that are not skipped, without columns that are empty for all,
// such as the MFU of a CPU. Notes have the reasons of the cells that did not succeed.
func (r *Results) Table() readable.Table {
	t := readable.Table{Title: fmt.Sprintf("%s on %s", r.Name, r.Machine), Notes: r.reasons()}
	var columns []column
	for _, key := range keysOf(r.Grid) {
		columns = append(columns, column{key, key, 0})
	}
	var cells []map[string]any
	for i := range r.Cells {
		c := &r.Cells[i]
		if c.Status == Skipped {
			continue
		}
		fields, _ := c.fields() // WriteCSV reports the error
		for _, a := range r.Grid {
			fields[a.Key] = sizeText(c.Values[a.Key])
		}
		cells = append(cells, fields)
	}
	t.Rows = make([][]string, len(cells))
	for _, col := range append(columns, shown...) {
		if !slices.ContainsFunc(cells, func(c map[string]any) bool { return col.text(c) != "" }) {
			continue
		}
		t.Head = append(t.Head, col.head)
		for i, c := range cells {
			t.Rows[i] = append(t.Rows[i], terminal.Clip(terminal.Name(col.text(c)), 40))
		}
	}
	return t
}

// text formats the field of a cell; "" for 0 and none.
func (col column) text(cell map[string]any) string {
	switch x, isNumber := cell[col.field].(float64); {
	case !isNumber:
		return Text(cell[col.field])
	case x == 0:
		return ""
	case col.field == perSecond:
		return readable.Count(int64(x + 0.5))
	default:
		return readable.Number(x * col.factor)
	}
}

// reasons returns a line for each reason, with the first cell that has it and the number of the others.
func (r *Results) reasons() (lines []string) {
	cells := map[string]int{} // by reason
	for i := range r.Cells {
		cells[r.Cells[i].Error]++
	}
	for i := range r.Cells {
		c := &r.Cells[i]
		n := cells[c.Error]
		if c.Error == "" || n == 0 {
			continue
		}
		cells[c.Error] = 0
		who := r.Label(c)
		if n > 1 {
			who += fmt.Sprintf(" and %d more", n-1)
		}
		lines = append(lines, fmt.Sprintf("%s  %s: %s", who, c.Status, terminal.Clip(c.Error, 200)))
	}
	return lines
}

// Label returns the values of a cell, with the last parts of their keys: seq_len=128K.
func (r *Results) Label(c *Cell) string {
	var parts []string
	for _, a := range r.Grid {
		_, name, nested := strings.Cut(a.Key, ".")
		if !nested {
			name = a.Key
		}
		parts = append(parts, name+"="+sizeText(c.Values[a.Key]))
	}
	return strings.Join(parts, " ")
}

// sizeText formats a value of the grid: 131072 is 128K.
func sizeText(value any) string {
	if n, ok := value.(int64); ok {
		return readable.Size(n)
	}
	return Text(value)
}
