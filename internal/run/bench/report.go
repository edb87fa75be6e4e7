// Package bench measures attention over ranks, transfers, single operations and training steps on any device. A Report
// holds the results, as tables and JSON. Figures are medians over iterations, by the device's own clock, of the slowest
// rank. The ranks call a method of Rank:
//
//	r := &bench.Rank{Device: dev, World: group, Control: group}
//	err := r.Comm(ctx, bench.CommSpec{Sizes: []int64{1 << 20}, Calls: bench.Calls}, emit)
package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/metrics"
)

// Report is the result of `cprun bench`, as --json writes it. Bench names the one of Attention, Comm, Train and Ops
// that is set.
type Report struct {
	Bench   string    `json:"bench"`   // attention, comm, train, ops
	Command []string  `json:"command"` // the command line, without the program
	Version string    `json:"version"` // of cprun
	Date    time.Time `json:"date"`
	Ranks   int       `json:"ranks"`
	Machine Machine   `json:"machine"` // of rank 0

	Attention *Attention  `json:"attention,omitempty"`
	Comm      []Transfer  `json:"comm,omitempty"`
	Train     *Training   `json:"train,omitempty"`
	Ops       []Operation `json:"ops,omitempty"`
}

// Machine describes the machine of a rank.
type Machine struct {
	Device   string            `json:"device"`             // "NVIDIA H200", "cpu"
	Arch     int               `json:"arch,omitempty"`     // of a GPU, 10 times its compute capability: 90
	Cores    int               `json:"cores"`              // of the node
	Versions map[string]string `json:"versions,omitempty"` // of libraries and the driver
}

// Attention holds the Rows of `bench attention` and their common Spec.
type Attention struct {
	Spec AttentionSpec  `json:"spec"`
	Rows []AttentionRow `json:"rows"`
	// Packed replaces Rows for packed documents.
	Packed []PackedRow `json:"packed,omitempty"`
}

// AttentionRow is attention over one sequence. Seconds and rates are those of the slowest rank. Rates divide FLOPs by
// the number of ranks.
type AttentionRow struct {
	Seq       int    `json:"seq"` // global tokens
	Algorithm string `json:"algorithm"`
	Gather    string `json:"gather"` // when an all-gather sends its rows
	Layout    string `json:"layout"`
	Backend   string `json:"backend"`
	Ranks     int    `json:"ranks"`
	Tokens    int    `json:"tokens_per_rank"` // of the rank with most
	Iters     int    `json:"iters"`

	FLOPs   float64 `json:"flops"` // forward, of all ranks
	Forward Rate    `json:"forward"`
	Both    Rate    `json:"forward_backward"`

	// Local runs the same kernel calls without transfers. It is absent with one rank.
	Local *Rate `json:"forward_backward_without_transfers,omitempty"`
	// Alone runs one rank alone on its share of the tokens. It is absent with one rank.
	Alone *Rate `json:"forward_backward_alone,omitempty"`
	// Loss is the lost share of Alone's rate; negative for a gain.
	Loss *float64 `json:"loss,omitempty"`

	// SentForward and SentBackward are the bytes sent by the rank with most.
	SentForward  int64 `json:"sent_forward_bytes"`
	SentBackward int64 `json:"sent_backward_bytes"`
	Memory       int64 `json:"memory_bytes"` // tensors and buffers, without the kernel's workspace

	Hops []HopTimes `json:"hops,omitempty"` // of the slowest rank, traced
}

// Rate is a time and the rate on each device.
type Rate struct {
	Seconds float64 `json:"seconds"`
	TFLOPs  float64 `json:"tflops_per_device"` // 10^12 floating point operations a second
}

// HopTimes is one hop of a traced pass, in seconds.
type HopTimes struct {
	Pass     string  `json:"pass"` // forward, backward
	Label    string  `json:"label"`
	Compute  float64 `json:"compute_seconds"`  // kernels
	Quiet    float64 `json:"quiet_seconds"`    // the same kernels without transfers
	Transfer float64 `json:"transfer_seconds"` // the hop's transfers without kernels
	Wait     float64 `json:"wait_seconds"`     // idle time of the compute stream
}

// Transfer is one size of one call over one transport.
type Transfer struct {
	Transport string  `json:"transport"` // unix, tcp, nccl, copy
	Call      string  `json:"call"`      // exchange, all_reduce, all_gather, reduce_scatter
	Bytes     int64   `json:"bytes"`     // sent to the neighbour, or the whole buffer of a collective
	Seconds   float64 `json:"seconds"`
	// GBps is the bus bandwidth, in 1e9 bytes per second and direction on a rank's link.
	GBps float64 `json:"gb_per_second"`
	// Share is GBps divided by the link's limit; 0: unknown.
	Share float64 `json:"share_of_link,omitempty"`
}

// Operation is one operation of the model at one shape.
type Operation struct {
	Name    string  `json:"name"`
	Shape   string  `json:"shape"`
	Seconds float64 `json:"seconds"`
	Rate    float64 `json:"rate"`
	Unit    string  `json:"unit"`            // GB/s or TFLOP/s
	Share   float64 `json:"share,omitempty"` // of the fastest operation with the same unit; 0: unknown
}

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

// Rows returns the number of rows.
func (r *Report) Rows() int {
	n := len(r.Comm) + len(r.Ops)
	if r.Attention != nil {
		n += len(r.Attention.Rows) + len(r.Attention.Packed)
	}
	if r.Train != nil {
		n += len(r.Train.Steps)
	}
	return n
}

// Median returns the middle of xs, or the mean of the two in the middle; 0 of none.
func Median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(xs))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// Spread returns the interquartile range of xs divided by the median; for fewer than 4 values, the whole range.
func Spread(xs []float64) float64 {
	s := slices.Sorted(slices.Values(xs))
	if quarter := len(s) / 4; quarter > 0 {
		s = s[quarter : len(s)-quarter]
	}
	if m := Median(xs); m > 0 {
		return (s[len(s)-1] - s[0]) / m
	}
	return 0
}

// FLOPs returns the floating-point operations of a forward pass of attention with the given visible (query, key) pairs
// per head: two products, over dim and over dimV. A causal sequence of S tokens has S(S+1)/2 pairs.
func FLOPs(pairs, heads, dim, dimV int) float64 {
	return 2 * float64(pairs) * float64(heads) * float64(dim+dimV)
}

// bothOfForward is the ratio of the FLOPs of both passes to those of the forward pass: seven products to two.
const bothOfForward = 3.5

func rate(flops, seconds float64, ranks int) Rate {
	if seconds <= 0 {
		return Rate{}
	}
	return Rate{Seconds: seconds, TFLOPs: flops / seconds / float64(ranks) / 1e12}
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
