package bench

import (
	"bufio"
	"encoding/json"
	"fmt"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/metrics"
)

// Counted holds the measurements of a run after its warm-up, one value for each step. A list is empty if a value is not
// known.
type Counted struct {
	StepSeconds              []float64 `json:"step_seconds"`
	TokensPerSecond          []float64 `json:"tokens_per_second"`
	TokensPerSecondPerDevice []float64 `json:"tokens_per_second_per_device"`
	TFLOPsPerDevice          []float64 `json:"tflops_per_device"`
	MFU                      []float64 `json:"mfu"`
	CommWaitSeconds          []float64 `json:"comm_wait_seconds"`
	MemoryBytes              int64     `json:"memory_bytes"` // the most, warming up included
}

// Count returns the steps of a run's metrics after its warm-up; nil if there are none.
func Count(steps []metrics.Step, warmup int) *Counted {
	c := &Counted{}
	for _, s := range steps {
		c.MemoryBytes = max(c.MemoryBytes, s.MemoryBytes)
		if s.Step <= int64(warmup) { // a validation before the first step is step 0
			continue
		}
		for _, f := range []struct {
			to   *[]float64
			what metrics.Float
		}{
			{&c.StepSeconds, s.StepSeconds}, {&c.TokensPerSecond, s.TokensPerSecond},
			{&c.TokensPerSecondPerDevice, s.TokensPerSecondPerDevice}, {&c.TFLOPsPerDevice, s.TFLOPsPerDevice},
			{&c.MFU, s.MFU}, {&c.CommWaitSeconds, s.CommWaitSeconds},
		} {
			if f.what.Known() {
				*f.to = append(*f.to, float64(f.what))
			}
		}
	}
	if len(c.StepSeconds) == 0 {
		return nil
	}
	return c
}

// Summarise sets the figures of t from the steps of a run. Medians leave out the first t.Skipped, which compile,
// allocate and warm up.
func (t *Training) Summarise(steps []metrics.Step) error {
	c := Count(steps, t.Skipped)
	if c == nil {
		return fmt.Errorf("%d steps were logged; want more than the %d that are left out", len(steps), t.Skipped)
	}
	for _, s := range steps {
		t.Steps, t.Loss = append(t.Steps, float64(s.StepSeconds)), append(t.Loss, s.Loss)
	}
	t.StepSeconds, t.TokensPerSecond, t.TFLOPs = Median(c.StepSeconds), Median(c.TokensPerSecondPerDevice),
		Median(c.TFLOPsPerDevice)
	t.MFU, t.CommWait, t.Memory = Median(c.MFU), metrics.Absent, c.MemoryBytes
	if len(c.CommWaitSeconds) > 0 {
		t.CommWait = metrics.Float(Median(c.CommWaitSeconds))
	}
	return nil
}

// ReadMetrics reads a metrics.jsonl.
func ReadMetrics(path string) ([]metrics.Step, error) {
	f, err := files.Open(path)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	defer f.Close()
	var steps []metrics.Step
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var s metrics.Step
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", path, len(steps)+1, err)
		}
		steps = append(steps, s)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return steps, nil
}
