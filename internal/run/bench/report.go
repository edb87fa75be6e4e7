// Package bench measures: attention over ranks, transfers, single operations, and training
// steps, on whatever device a rank has, and shows what it found as tables and JSON.
//
// Figures are medians over iterations by the device's own clock, of the rank that was slowest.
package bench

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/metrics"
)

// Report is the result of `cprun bench`, as --json writes it. Bench names the one of Attention, Comm, Train and Ops
// that is set.
type Report struct {
	Bench   string    `json:"bench"`   // attention, comm, train, ops
	Command []string  `json:"command"` // as given, without the program
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

// Attention is the Rows of `bench attention`, and the Spec that they have in common.
type Attention struct {
	Spec AttentionSpec  `json:"spec"`
	Rows []AttentionRow `json:"rows"`
	// Packed replaces Rows for packed documents.
	Packed []PackedRow `json:"packed,omitempty"`
}

// AttentionRow is attention over one sequence. Seconds and rates are of the slowest rank; FLOPs
// are counted as in FLOPs, and divided by the ranks.
type AttentionRow struct {
	Seq       int    `json:"seq"` // global tokens
	Algorithm string `json:"algorithm"`
	Gather    string `json:"gather"` // when an all-gather's rows travel
	Layout    string `json:"layout"`
	Backend   string `json:"backend"` // that ran
	Ranks     int    `json:"ranks"`
	Tokens    int    `json:"tokens_per_rank"` // of the rank that has most
	Iters     int    `json:"iters"`

	FLOPs   float64 `json:"flops"` // forward, of all ranks
	Forward Rate    `json:"forward"`
	Both    Rate    `json:"forward_backward"`

	// Local is the same kernel calls without the transfers. It is absent with one rank.
	Local *Rate `json:"forward_backward_without_transfers,omitempty"`
	// Alone is one rank by itself on as many tokens as each has here. Absent with one rank.
	Alone *Rate `json:"forward_backward_alone,omitempty"`
	// Loss is the share of Alone's rate that is lost, less than 0 for a gain.
	Loss *float64 `json:"loss,omitempty"`

	// Bytes that the rank sends that sends most.
	SentForward  int64 `json:"sent_forward_bytes"`
	SentBackward int64 `json:"sent_backward_bytes"`
	Memory       int64 `json:"memory_bytes"` // of tensors and buffers, without the kernel's workspace

	Hops []HopTimes `json:"hops"` // of the rank that took longest, once, with tracing on
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
	Compute  float64 `json:"compute_seconds"`  // of the kernels
	Quiet    float64 `json:"quiet_seconds"`    // of the same calls in a pass without transfers
	Transfer float64 `json:"transfer_seconds"` // of the hop's transfers, measured with no kernel beside them
	Wait     float64 `json:"wait_seconds"`     // in which the compute stream stood still
}

// Transfer is one size of one call over one transport.
type Transfer struct {
	Transport string  `json:"transport"` // unix, tcp, nccl, copy
	Call      string  `json:"call"`      // exchange, all_reduce, all_gather, reduce_scatter
	Bytes     int64   `json:"bytes"`     // that a rank sends to its neighbour, or of the whole buffer of a collective
	Seconds   float64 `json:"seconds"`
	// GBps is 1e9 bytes per second and direction on a rank's link: the least traffic of any algorithm ("bus
	// bandwidth").
	GBps float64 `json:"gb_per_second"`
	// Share is the share of the link's limit; 0: not known.
	Share float64 `json:"share_of_link,omitempty"`
}

// Operation is one operation of the model at one shape.
type Operation struct {
	Name    string  `json:"name"`
	Shape   string  `json:"shape"`
	Seconds float64 `json:"seconds"`
	Rate    float64 `json:"rate"`
	Unit    string  `json:"unit"`            // GB/s or TFLOP/s
	Share   float64 `json:"share,omitempty"` // of the fastest of its unit in the same run; 0: not known
}

// Training is the steps of `bench train`.
type Training struct {
	Config     string `json:"config"`
	Data       string `json:"data"` // random, or config
	Seq        int    `json:"seq"`  // global tokens of a sample
	Batch      int    `json:"global_batch_size"`
	Parameters int64  `json:"parameters"`
	Skipped    int    `json:"skipped_steps"` // at the start, left out of the medians

	StepSeconds     float64         `json:"step_seconds"`
	TokensPerSecond float64         `json:"tokens_per_second_per_device"`
	TFLOPs          float64         `json:"tflops_per_device"`
	MFU             float64         `json:"mfu,omitempty"`      // 0: the device's peak is not known
	CommWait        metrics.Float   `json:"comm_wait_seconds"`  // null: not known
	FirstStep       float64         `json:"first_step_seconds"` // from the start of the command to the end of step 1
	Memory          int64           `json:"memory_bytes"`       // most of any device
	Planned         int64           `json:"planned_memory_bytes"`
	Steps           []float64       `json:"steps_seconds"`
	Loss            []metrics.Float `json:"loss"`
}

// Rows returns how many figures there are.
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

// Encode writes the report as JSON.
func (r *Report) Encode(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
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

// Spread returns how far the middle half of xs lies apart, or all of few, as a share of their median; 0 of none.
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

// FLOPs returns the floating-point operations of a forward pass of attention over that many visible
// (query, key) pairs of a head: two products, over dim and over dimV. A causal sequence of S tokens has S(S+1)/2 pairs.
func FLOPs(pairs, heads, dim, dimV int) float64 {
	return 2 * float64(pairs) * float64(heads) * float64(dim+dimV)
}

// bothOfForward is what forward and backward take together: the backward pass has five
// products where the forward pass has two.
const bothOfForward = 3.5

func rate(flops, seconds float64, ranks int) Rate {
	if seconds <= 0 {
		return Rate{}
	}
	return Rate{Seconds: seconds, TFLOPs: flops / seconds / float64(ranks) / 1e12}
}

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
