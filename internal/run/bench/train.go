package bench

import (
	"fmt"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model/metrics"
)

// Training holds the steps of `bench train`.
type Training struct {
	Config     string `json:"config"`
	Data       string `json:"data"` // random, or config
	Seq        int    `json:"seq"`  // global tokens of a sample
	Batch      int    `json:"global_batch_size"`
	Parameters int64  `json:"parameters"`
	Skipped    int    `json:"skipped_steps"` // warm-up steps, not in the medians

	StepSeconds     float64         `json:"step_seconds"`
	Predicted       float64         `json:"predicted_step_seconds,omitempty"` // 0: no cost table fits this machine
	TokensPerSecond float64         `json:"tokens_per_second_per_device"`
	TFLOPs          float64         `json:"tflops_per_device"`
	MFU             float64         `json:"mfu,omitempty"`      // 0: the device's peak is unknown
	CommWait        metrics.Float   `json:"comm_wait_seconds"`  // null: unknown
	FirstStep       float64         `json:"first_step_seconds"` // from the start of the command to the end of step 1
	Memory          int64           `json:"memory_bytes"`       // of the device with most
	Planned         int64           `json:"planned_memory_bytes"`
	Steps           []float64       `json:"steps_seconds"`
	Loss            []metrics.Float `json:"loss"`
}

// Counted holds the measurements of a run after its warm-up, one value per step. Lists of unknown values are empty.
type Counted struct {
	StepSeconds              []float64 `json:"step_seconds"`
	TokensPerSecond          []float64 `json:"tokens_per_second"`
	TokensPerSecondPerDevice []float64 `json:"tokens_per_second_per_device"`
	TFLOPsPerDevice          []float64 `json:"tflops_per_device"`
	MFU                      []float64 `json:"mfu"`
	CommWaitSeconds          []float64 `json:"comm_wait_seconds"`
	MemoryBytes              int64     `json:"memory_bytes"` // maximum, warm-up included
}

func (c *Counted) lists() []*[]float64 {
	return []*[]float64{&c.StepSeconds, &c.TokensPerSecond, &c.TokensPerSecondPerDevice, &c.TFLOPsPerDevice, &c.MFU,
		&c.CommWaitSeconds}
}

// Add appends the steps of another run.
func (c *Counted) Add(o *Counted) {
	for i, to := range c.lists() {
		*to = append(*to, *o.lists()[i]...)
	}
	c.MemoryBytes = max(c.MemoryBytes, o.MemoryBytes)
}

// Count returns the steps of a run's metrics after its warm-up; nil if there are none.
func Count(steps []metrics.Step, warmup int) *Counted {
	c := &Counted{}
	for _, s := range steps {
		c.MemoryBytes = max(c.MemoryBytes, s.MemoryBytes)
		if s.Step <= int64(warmup) { // a validation before the first step is step 0
			continue
		}
		for i, x := range []metrics.Float{s.StepSeconds, s.TokensPerSecond, s.TokensPerSecondPerDevice,
			s.TFLOPsPerDevice, s.MFU, s.CommWaitSeconds} {
			if to := c.lists()[i]; x.Known() {
				*to = append(*to, float64(x))
			}
		}
	}
	if len(c.StepSeconds) == 0 {
		return nil
	}
	return c
}

// Summarise sets the figures of t from the steps of a run. Medians omit the first t.Skipped steps, the warm-up.
func (t *Training) Summarise(steps []metrics.Step) error {
	c := Count(steps, t.Skipped)
	if c == nil {
		return fmt.Errorf("the run logged %d steps; want more than the %d of the warm-up", len(steps), t.Skipped)
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
	torn, err := metrics.EachStep(f, func(s metrics.Step) { steps = append(steps, s) })
	if err == nil && torn > 0 {
		err = fmt.Errorf("%d lines beside %d steps are no metrics", torn, len(steps))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return steps, nil
}

func (t *Training) table(on string) readable.Table {
	unit, scale := flopUnit(t.TFLOPs)
	out := readable.Table{
		Title: fmt.Sprintf("training steps of %s, S=%s, batch %d, %s tokens; %s; medians of %d steps after %d",
			t.Config, readable.Size(int64(t.Seq)), t.Batch, t.Data, on, len(t.Steps)-t.Skipped, t.Skipped),
		Head: []string{"step s", "tokens/s/device", unit + "/device", "MFU", "waiting s", "first step s", "memory",
			"planned"},
	}
	mfu, wait := "", ""
	if t.MFU > 0 {
		mfu = readable.Percent(t.MFU)
	}
	if t.CommWait.Known() {
		wait = readable.Number(float64(t.CommWait))
	}
	out.Add(readable.Number(t.StepSeconds), fmt.Sprintf("%.0f", t.TokensPerSecond), readable.Number(scale*t.TFLOPs),
		mfu, wait,
		readable.Number(t.FirstStep), readable.Bytes(t.Memory), readable.Bytes(t.Planned))
	return out
}
