// Package metrics writes the measurements of a run: metrics.jsonl, TensorBoard event files, a
// Prometheus endpoint and Chrome traces. It measures nothing itself; the training loop fills
// a Step and hands it to a Writer.
package metrics

import (
	"errors"
	"math"
	"os"
	"strconv"
	"time"
)

// Float is a number that may be absent. JSON has neither NaN nor infinities, so every value
// that is not finite is written as null: an absent one (NaN) as well as a loss that
// diverged. Readers such as pandas turn null back into NaN; a string would turn the
// whole column into text.
type Float float64

// Absent is the value of an unknown number, such as the MFU of a device
// without a known peak.
var Absent = Float(math.NaN())

// Known reports whether f is present: infinities are, NaN is not.
func (f Float) Known() bool { return !math.IsNaN(float64(f)) }

// MarshalJSON writes a finite number in the shortest form that reads back to the same
// float64, and null for anything else.
func (f Float) MarshalJSON() ([]byte, error) {
	x := float64(f)
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return []byte("null"), nil
	}
	format := byte('f')
	if a := math.Abs(x); a != 0 && (a < 1e-6 || a >= 1e21) {
		format = 'e'
	}
	return strconv.AppendFloat(nil, x, format, -1, 64), nil
}

// UnmarshalJSON reads a number, or null as Absent.
func (f *Float) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		*f = Absent
		return nil
	}
	x, err := strconv.ParseFloat(string(data), 64)
	*f = Float(x)
	return err
}

// Time is a moment, written in UTC to the millisecond as RFC 3339 has it.
type Time time.Time

// MarshalJSON writes it.
func (t Time) MarshalJSON() ([]byte, error) {
	return []byte(time.Time(t).UTC().Format(`"2006-01-02T15:04:05.000Z"`)), nil
}

// UnmarshalJSON reads any time of RFC 3339.
func (t *Time) UnmarshalJSON(data []byte) error { return (*time.Time)(t).UnmarshalJSON(data) }

// Untrained returns the line of a validation before the first step.
func Untrained(at time.Time, valLoss, memoryBytes float64) Step {
	v := Float(valLoss)
	return Step{
		Time: Time(at), Loss: Absent, GradNorm: Absent, LR: Absent, StepSeconds: Absent, TokensPerSecond: Absent,
		TokensPerSecondPerDevice: Absent,
		TFLOPsPerDevice:          Absent, MFU: Absent, MemoryBytes: int64(memoryBytes), CommWaitSeconds: Absent,
		AttentionImbalance: Absent, AttentionBytes: Absent, ValLoss: &v,
	}
}

// Step is one line of metrics.jsonl, about one optimizer step. The order of the fields is
// the order in the file.
type Step struct {
	Time Time  `json:"time"` // when it was logged
	Step int64 `json:"step"` // 1 is the first; 0 is the validation before it, and has no other values
	// samples consumed over the samples of the data: 1.5 is half through the second time
	Epoch    Float `json:"epoch"`
	Loss     Float `json:"loss"`      // mean over all valid target tokens of the step, before the update, in nats
	GradNorm Float `json:"grad_norm"` // global, before clipping
	LR       Float `json:"lr"`
	// Tokens is all tokens that the run has trained on up to and with this step, over all
	// ranks and across resumes: the axis that loss curves of different batch sizes share.
	Tokens                   int64 `json:"tokens"`
	StepSeconds              Float `json:"step_seconds"`
	TokensPerSecond          Float `json:"tokens_per_second"` // over all ranks
	TokensPerSecondPerDevice Float `json:"tokens_per_second_per_device"`
	// model FLOPs: causal attention halved, recompute not counted
	TFLOPsPerDevice Float `json:"tflops_per_device"`
	// fraction of the device's peak, 0 to 1; Absent without a known peak, as on a CPU
	MFU         Float `json:"mfu"`
	MemoryBytes int64 `json:"memory_bytes"` // peak of the device that uses most
	// compute stood waiting for transfers, on the rank that waited longest
	CommWaitSeconds Float `json:"comm_wait_seconds"`
	// AttentionImbalance is the visible pairs of the slowest rank over those of the mean one, 1 where
	// all have as many, in the sequences of the group of ranks in which they differ most.
	AttentionImbalance Float `json:"attention_imbalance"`
	// keys, values and gradients of them that the rank sends which sends most
	AttentionBytes Float  `json:"attention_bytes"`
	ValLoss        *Float `json:"val_loss,omitempty"` // nil on steps without validation
}

// Writer takes the steps of a run in ascending order. Implementations are not safe for
// concurrent use.
type Writer interface {
	Write(Step) error
	// Sync returns when the steps so far outlast a loss of power, where they go to a disk.
	Sync() error
	Close() error // ends the file or server; everything is written by then
}

// Options says which writers a run has.
type Options struct {
	Dir         *os.Root // run directory; it stays the caller's, and open for as long as the Writer
	Resumed     int64    // step of the checkpoint that the run goes on from; 0 for a new run
	TensorBoard bool
	Config      string       // the resolved config, as TensorBoard shows it; "" for none
	Prometheus  string       // "host:port" to serve on, ":port" for loopback only, "" for none
	Warn        func(string) // told of what the user should know; nil ignores it
}

// Open makes the writers of one run: metrics.jsonl and what the options ask for.
func Open(o Options) (Writer, error) {
	var all multi
	jsonl, err := OpenJSONL(o.Dir, "metrics.jsonl", o.Resumed, o.Warn)
	if err != nil {
		return nil, err
	}
	all = append(all, jsonl)
	if o.TensorBoard {
		tb, err := CreateTensorBoard(o.Dir, o.Resumed, o.Config)
		if err != nil {
			return nil, errors.Join(err, all.Close())
		}
		all = append(all, tb)
	}
	if o.Prometheus != "" {
		p, err := ServePrometheus(o.Prometheus, o.Resumed)
		if err != nil {
			return nil, errors.Join(err, all.Close())
		}
		all = append(all, p)
	}
	return all, nil
}

// multi writes to each of its writers, also when one of them has an error.
type multi []Writer

func (m multi) each(f func(Writer) error) (err error) {
	for _, w := range m {
		err = errors.Join(err, f(w))
	}
	return err
}

func (m multi) Write(s Step) error { return m.each(func(w Writer) error { return w.Write(s) }) }
func (m multi) Sync() error        { return m.each(Writer.Sync) }
func (m multi) Close() error       { return m.each(Writer.Close) }
