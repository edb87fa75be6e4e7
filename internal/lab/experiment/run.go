package experiment

import (
	"slices"
	"time"

	"github.com/cprun/cprun/internal/run/bench"
)

// Run is one run of a cell that has ended: a line of cells.jsonl.
type Run struct {
	Cell    string    `json:"cell"`
	Run     int       `json:"run"` // from 1
	Status  Status    `json:"status"`
	Error   string    `json:"error,omitempty"`
	Ended   time.Time `json:"ended"`
	Seconds float64   `json:"seconds"` // of the whole run, with its start
	Commit  string    `json:"commit"`  // of the program that ran it
	// relative to the file's directory; "": none was started, since the cell cannot run
	Dir     string   `json:"dir"`
	Counted *Counted `json:"counted,omitempty"`
	Plan    Plan     `json:"plan"` // on the machine of the run
}

// A Plan predicts a cell before it runs; 0 and nil are not known.
type Plan struct {
	Choices
	StepSeconds float64 `json:"step_seconds,omitempty"` // predicted
	Memory      *Memory `json:"memory,omitempty"`       // of the rank that needs most
}

// Total returns the sum of the kinds.
func (m *Memory) Total() int64 {
	return m.Weights + m.Gradients + m.Optimizer + m.Activations + m.Workspace
}

// Predict sets the prediction of the cell.
func (c *Cell) Predict(p Plan) {
	c.Choices, c.PredictedStepSeconds, c.Memory = p.Choices, p.StepSeconds, p.Memory
	if p.Memory != nil {
		c.PlannedMemoryBytes = p.Memory.Total()
	}
}

// Counted holds the measurements of a run after its warm-up.
type Counted = bench.Counted

// Settle sets the statuses and figures of the cells from their runs. Of two lines for one run the later
// counts. A cell is done when it has repeat good runs, or one that is not.
func Settle(cells []Cell, runs []Run, repeat int) {
	of := map[string][]Run{}
	for _, r := range runs {
		list := of[r.Cell]
		if i := slices.IndexFunc(list, func(o Run) bool { return o.Run == r.Run }); i >= 0 {
			list[i] = r
		} else {
			of[r.Cell] = append(list, r)
		}
	}
	for i := range cells {
		if list := of[cells[i].ID]; len(list) > 0 {
			slices.SortFunc(list, func(a, b Run) int { return a.Run - b.Run })
			cells[i].settle(list, repeat)
		}
	}
}

// settle does the same for one cell.
func (c *Cell) settle(runs []Run, repeat int) {
	all := Counted{}
	c.Runs, c.RunDirs, c.Status, c.Error = 0, nil, Pending, ""
	if len(runs) >= repeat {
		c.Status = OK
	}
	for _, r := range runs {
		c.Predict(r.Plan)
		if r.Dir != "" {
			c.Runs, c.RunDirs = c.Runs+1, append(c.RunDirs, r.Dir)
		}
		if r.Status != OK && c.Error == "" {
			c.Status, c.Error = r.Status, r.Error
		}
		if r.Counted != nil {
			add(&all, r.Counted)
		}
	}
	if len(all.StepSeconds) == 0 {
		return
	}
	c.StepSeconds, c.StepSecondsMin, c.StepSecondsMax = bench.Median(all.StepSeconds), slices.Min(all.StepSeconds),
		slices.Max(all.StepSeconds)
	c.TokensPerSecond, c.TokensPerSecondPerDevice = bench.Median(all.TokensPerSecond),
		bench.Median(all.TokensPerSecondPerDevice)
	c.TFLOPsPerDevice, c.MFU, c.MemoryBytes = bench.Median(all.TFLOPsPerDevice), bench.Median(all.MFU), all.MemoryBytes
	if len(all.CommWaitSeconds) > 0 {
		wait := bench.Median(all.CommWaitSeconds)
		c.CommWaitSeconds = &wait
	}
}

// add appends the steps of another run.
func add(c, o *Counted) {
	c.StepSeconds = append(c.StepSeconds, o.StepSeconds...)
	c.TokensPerSecond = append(c.TokensPerSecond, o.TokensPerSecond...)
	c.TokensPerSecondPerDevice = append(c.TokensPerSecondPerDevice, o.TokensPerSecondPerDevice...)
	c.TFLOPsPerDevice = append(c.TFLOPsPerDevice, o.TFLOPsPerDevice...)
	c.MFU = append(c.MFU, o.MFU...)
	c.CommWaitSeconds = append(c.CommWaitSeconds, o.CommWaitSeconds...)
	c.MemoryBytes = max(c.MemoryBytes, o.MemoryBytes)
}
