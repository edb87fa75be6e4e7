package experiment

import (
	"encoding/csv"
	"io"
	"strconv"
)

// columns are those of results.csv behind the grid's keys.
var columns = []struct {
	name string
	of   func(c *Cell) string
}{
	{"backend", func(c *Cell) string { return c.Backend }},
	{"layout", func(c *Cell) string { return c.Layout }},
	{"recompute", func(c *Cell) string { return c.Recompute }},
	{"status", func(c *Cell) string { return string(c.Status) }},
	{"tokens_per_second", func(c *Cell) string { return decimal(c.TokensPerSecond) }},
	{"tokens_per_second_per_device", func(c *Cell) string { return decimal(c.TokensPerSecondPerDevice) }},
	{"tflops_per_device", func(c *Cell) string { return decimal(c.TFLOPsPerDevice) }},
	{"mfu", func(c *Cell) string { return decimal(c.MFU) }},
	{"step_seconds", func(c *Cell) string { return decimal(c.StepSeconds) }},
	{"step_seconds_min", func(c *Cell) string { return decimal(c.StepSecondsMin) }},
	{"step_seconds_max", func(c *Cell) string { return decimal(c.StepSecondsMax) }},
	{"memory_bytes", func(c *Cell) string { return whole(c.MemoryBytes) }},
	{"planned_memory_bytes", func(c *Cell) string { return whole(c.PlannedMemoryBytes) }},
	{"comm_wait_seconds", func(c *Cell) string {
		if c.CommWaitSeconds == nil {
			return ""
		}
		return strconv.FormatFloat(*c.CommWaitSeconds, 'f', -1, 64)
	}},
	{"predicted_step_seconds", func(c *Cell) string { return decimal(c.PredictedStepSeconds) }},
	{"error", func(c *Cell) string { return c.Error }},
}

// decimal is a number as pandas and spreadsheets read it; "" for 0, which is not known.
func decimal(x float64) string {
	if x == 0 {
		return ""
	}
	return strconv.FormatFloat(x, 'f', -1, 64)
}

func whole(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// WriteCSV writes results.csv: a line for each cell that the experiment does not leave out, in the order of
// the grid.
func (r *Results) WriteCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	head := keysOf(r.Grid)
	for _, c := range columns {
		head = append(head, c.name)
	}
	out.Write(head) // Flush's error is that of all
	for i := range r.Cells {
		cell := &r.Cells[i]
		if cell.Status == Skipped {
			continue
		}
		var row []string
		for _, a := range r.Grid {
			row = append(row, cell.Text(a.Key))
		}
		for _, c := range columns {
			row = append(row, c.of(cell))
		}
		out.Write(row)
	}
	out.Flush()
	return out.Error()
}
