package command

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/experiment"
)

// show prints a table of all cells that the experiment does not leave out.
func (s *scale) show(r *experiment.Results) error {
	t := readable.Table{Title: fmt.Sprintf("%s on %s", r.Name, r.Machine)}
	type column struct {
		head string
		of   func(c *experiment.Cell) string
	}
	var all []column
	for _, a := range r.Grid {
		all = append(all, column{a.Key, func(c *experiment.Cell) string { return sizeText(c.Values[a.Key]) }})
	}
	status := column{"status", func(c *experiment.Cell) string { return string(c.Status) }}
	all = append(all,
		column{"backend", func(c *experiment.Cell) string { return c.Backend }},
		column{"layout", func(c *experiment.Cell) string { return c.Layout }},
		column{"recompute", func(c *experiment.Cell) string { return c.Recompute }},
		status,
		column{"step s", func(c *experiment.Cell) string { return figure(c.StepSeconds) }},
		column{"min", func(c *experiment.Cell) string { return figure(c.StepSecondsMin) }},
		column{"max", func(c *experiment.Cell) string { return figure(c.StepSecondsMax) }},
		column{"predicted s", func(c *experiment.Cell) string { return figure(c.PredictedStepSeconds) }},
		column{"tok/s", func(c *experiment.Cell) string {
			if c.TokensPerSecond == 0 {
				return ""
			}
			return readable.Count(int64(c.TokensPerSecond + 0.5))
		}},
		column{"TFLOP/s a device", func(c *experiment.Cell) string { return figure(c.TFLOPsPerDevice) }},
		column{"MFU %", func(c *experiment.Cell) string { return figure(100 * c.MFU) }},
		column{"GiB", func(c *experiment.Cell) string { return figure(float64(c.MemoryBytes) / (1 << 30)) }},
		column{"planned GiB", func(c *experiment.Cell) string {
			return figure(float64(c.PlannedMemoryBytes) / (1 << 30))
		}},
		column{"wait ms", func(c *experiment.Cell) string {
			if c.CommWaitSeconds == nil {
				return ""
			}
			return figure(1e3 * *c.CommWaitSeconds)
		}},
	)
	for _, col := range all {
		some := false
		for i := range r.Cells {
			some = some || r.Cells[i].Status != experiment.Skipped && col.of(&r.Cells[i]) != ""
		}
		if !some { // such as the MFU of a CPU
			continue
		}
		t.Head = append(t.Head, col.head)
		row := 0
		for i := range r.Cells {
			if r.Cells[i].Status == experiment.Skipped {
				continue
			}
			if row == len(t.Rows) {
				t.Rows = append(t.Rows, nil)
			}
			t.Rows[row] = append(t.Rows[row], terminal.Clip(terminal.Name(col.of(&r.Cells[i])), 40))
			row++
		}
	}
	more := map[string]int{} // cells with the reason of one before
	for i := range r.Cells {
		more[r.Cells[i].Error]++
	}
	for i := range r.Cells {
		c := &r.Cells[i]
		if c.Error == "" || more[c.Error] == 0 {
			continue
		}
		who := s.values(i)
		if n := more[c.Error] - 1; n > 0 {
			who += fmt.Sprintf(" and %d more", n)
		}
		more[c.Error] = 0
		t.Notes = append(t.Notes, fmt.Sprintf("%s  %s: %s", who, c.Status, terminal.Clip(c.Error, 200)))
	}
	t.Notes = append(t.Notes, "results     "+terminal.Name(s.Out))
	_, err := t.WriteTo(s.Stdout)
	return err
}

// figure returns a number; "" for 0, which is not known.
func figure(x float64) string {
	if x == 0 {
		return ""
	}
	return readable.Number(x)
}

// sizeText returns a value of a grid for a reader: 131072 is 128K.
func sizeText(value any) string {
	if n, ok := value.(int64); ok {
		return readable.Size(n)
	}
	return experiment.Text(value)
}
