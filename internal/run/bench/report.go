package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

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

// Print writes the report as tables.
func (r *Report) Print(w io.Writer) error {
	for i, t := range r.Tables() {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if _, err := t.WriteTo(w); err != nil {
			return err
		}
	}
	return nil
}
