// Package experiment implements the data of `cprun scale`: a grid of training runs. It reads experiment.yaml, records
// finished runs, and writes results.csv and results.json. Package scale runs the cells:
//
//	e, err := experiment.Load("experiment.yaml")
//	for _, c := range e.Cells() { ... }
package experiment

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"
)

// Version is the version of results.json.
const Version = 1

// A Status is the outcome of a cell.
type Status string

// The statuses of a cell.
const (
	OK          Status = "ok"
	Failed      Status = "failed"
	OutOfMemory Status = "out_of_memory" // on a device or the host, in the run or in its plan
	Timeout     Status = "timeout"       // the run exceeded the experiment's limit
	Refused     Status = "refused"       // the config or the machine does not allow the run
	Skipped     Status = "skipped"       // an entry of skip matches
	Pending     Status = "pending"       // not run yet
	Planned     Status = "planned"       // predicted only
)

// Results is results.json.
type Results struct {
	Version int       `json:"version"`
	Name    string    `json:"name"`    // name of the experiment's file, without extension
	Command string    `json:"command"` // the command line, quoted for a shell
	Commit  string    `json:"commit"`  // the version of cprun
	Machine string    `json:"machine"` // for people
	Created time.Time `json:"created"` // start of the experiment, UTC
	Base    string    `json:"base"`    // path of the base config, as written
	Device  string    `json:"device"`  // cpu or cuda

	Grid  []Axis         `json:"grid"`  // in the order of the file
	Set   map[string]any `json:"set"`   // keys for every cell, by path
	Cells []Cell         `json:"cells"` // every combination; the last axis varies fastest
}

// Axis is one key of the grid.
type Axis struct {
	Key    string `json:"key"`    // path of a config key, or nproc, nnodes or device
	Values []any  `json:"values"` // in the order of the file; sizes are numbers
}

// Cell is one combination of the grid's values. Unknown figures are 0 and omitted, except CommWaitSeconds, where 0 is a
// measurement. Figures cover the counted steps of all runs. A cell that exceeded the limit may have some.
type Cell struct {
	ID     string         `json:"id"`
	Values map[string]any `json:"values"` // by key of the axis
	Choices
	Status Status `json:"status"`
	Runs   int    `json:"runs"` // finished runs, failed ones included

	// medians
	TokensPerSecond          float64 `json:"tokens_per_second,omitempty"`
	TokensPerSecondPerDevice float64 `json:"tokens_per_second_per_device,omitempty"`
	// model FLOPs: causal attention halved, recompute not counted
	TFLOPsPerDevice    float64 `json:"tflops_per_device,omitempty"`
	MFU                float64 `json:"mfu,omitempty"`          // 0 to 1
	StepSeconds        float64 `json:"step_seconds,omitempty"` // median
	StepSecondsMin     float64 `json:"step_seconds_min,omitempty"`
	StepSecondsMax     float64 `json:"step_seconds_max,omitempty"`
	MemoryBytes        int64   `json:"memory_bytes,omitempty"` // measured, of the rank with most
	PlannedMemoryBytes int64   `json:"planned_memory_bytes,omitempty"`
	// exposed transfers of a step, median
	CommWaitSeconds      *float64 `json:"comm_wait_seconds,omitempty"`
	PredictedStepSeconds float64  `json:"predicted_step_seconds,omitempty"`

	Error   string   `json:"error,omitempty"` // one line, if the status is not ok
	Memory  *Memory  `json:"memory,omitempty"`
	RunDirs []string `json:"run_dirs,omitempty"` // relative to the directory of results.json
}

// Choices are resolved config keys in which cells with auto may differ; "" without a plan.
type Choices struct {
	Backend   string `json:"backend,omitempty"`   // attention.backend
	Layout    string `json:"layout,omitempty"`    // parallel.layout
	Recompute string `json:"recompute,omitempty"` // memory.recompute
}

// String returns the choices in the order of the columns.
func (c Choices) String() string {
	if c == (Choices{}) {
		return ""
	}
	return c.Backend + ", " + c.Layout + ", " + c.Recompute
}

// Memory holds the planned bytes of the rank with most, by kind. They sum to PlannedMemoryBytes.
type Memory struct {
	Weights     int64 `json:"weights"` // including compute copies
	Gradients   int64 `json:"gradients"`
	Optimizer   int64 `json:"optimizer"`
	Activations int64 `json:"activations"`
	Workspace   int64 `json:"workspace"` // buffers for transfers, batches, kernels, libraries and the driver
}

// Done reports whether the cell needs no more runs.
func (c *Cell) Done() bool { return c.Status != Pending }

// Number returns the cell's value of a grid key, if it is a number.
func (c *Cell) Number(key string) (n float64, ok bool) {
	switch v := c.Values[key].(type) {
	case float64:
		return v, true
	case int64:
		return float64(v), true
	case int:
		return float64(v), true
	}
	return 0, false
}

// Text returns the cell's value of a grid key in the format of results.csv; "" for none.
func (c *Cell) Text(key string) string { return Text(c.Values[key]) }

// Text formats a value of a grid for results.csv: numbers as decimals, lists as JSON.
func Text(value any) string {
	switch v := value.(type) {
	case nil:
		return ""
	case string:
		return v
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	text, err := json.Marshal(value)
	if err != nil { // impossible for values from YAML or JSON
		return fmt.Sprint(value)
	}
	return string(text)
}

// Decode reads a results.json. Numbers in the values of axes and cells become float64.
func Decode(r io.Reader) (*Results, error) {
	var res Results
	if err := json.NewDecoder(r).Decode(&res); err != nil {
		return nil, fmt.Errorf("results of an experiment: %w", err)
	}
	if res.Version != Version {
		return nil, fmt.Errorf("results of an experiment: version %d; this program reads version %d", res.Version,
			Version)
	}
	return &res, nil
}

// columns are the fields of a Cell in results.csv, after the keys of the grid.
var columns = []string{
	"backend", "layout", "recompute", "status", "tokens_per_second", "tokens_per_second_per_device",
	"tflops_per_device", "mfu", "step_seconds", "step_seconds_min", "step_seconds_max", "memory_bytes",
	"planned_memory_bytes", "comm_wait_seconds", "predicted_step_seconds", "error",
}

// fields returns the fields of a cell by their names in results.json.
func (c *Cell) fields() (map[string]any, error) {
	fields := map[string]any{}
	text, err := json.Marshal(c)
	if err != nil {
		return fields, err
	}
	return fields, json.Unmarshal(text, &fields)
}

// WriteCSV writes results.csv: a line for each cell that is not skipped, in the order of the grid.
func (r *Results) WriteCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	out.Write(append(keysOf(r.Grid), columns...)) // Flush returns all errors
	for i := range r.Cells {
		cell := &r.Cells[i]
		if cell.Status == Skipped {
			continue
		}
		var row []string
		for _, a := range r.Grid {
			row = append(row, cell.Text(a.Key))
		}
		fields, err := cell.fields()
		if err != nil {
			return err
		}
		for _, name := range columns {
			row = append(row, Text(fields[name]))
		}
		out.Write(row)
	}
	out.Flush()
	return out.Error()
}
