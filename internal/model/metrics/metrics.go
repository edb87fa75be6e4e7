// Package metrics writes the measurements of a run: metrics.jsonl, TensorBoard event files, a Prometheus endpoint and
// Chrome traces. The training loop fills a Step and passes it to the Writer from Open.
package metrics

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Float is a number that may be absent. JSON has neither NaN nor infinities, so values that are not finite become null:
// absent ones (NaN) and diverged losses. Readers such as pandas read null as NaN; a string would turn the whole column
// into text.
type Float float64

// Absent is an unknown number, such as the MFU of a device without a known peak.
var Absent = Float(math.NaN())

// Known reports whether f is present. An infinity is, NaN is not.
func (f Float) Known() bool { return !math.IsNaN(float64(f)) }

// MarshalJSON writes a finite number in the shortest form that reads back as the same float64, and null for other
// values.
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

// Time is a moment, in UTC to the millisecond in the form of RFC 3339.
type Time time.Time

// MarshalJSON writes the time.
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

// Step is one line of metrics.jsonl, about one optimizer step, with the fields in the order of the file.
type Step struct {
	Time Time  `json:"time"` // time of the log line
	Step int64 `json:"step"` // from 1; 0 is the validation before it, without other values
	// Epoch is the consumed samples over those of an epoch: 1.5 is half through the second.
	Epoch    Float `json:"epoch"`
	Loss     Float `json:"loss"`      // mean over the valid target tokens, before the update, in nats
	GradNorm Float `json:"grad_norm"` // global, before clipping
	LR       Float `json:"lr"`
	// Tokens is the number of tokens trained on up to this step, over all ranks and resumes. Loss curves of different
	// batch sizes share this axis.
	Tokens                   int64 `json:"tokens"`
	StepSeconds              Float `json:"step_seconds"`
	TokensPerSecond          Float `json:"tokens_per_second"` // over all ranks
	TokensPerSecondPerDevice Float `json:"tokens_per_second_per_device"`
	// TFLOPsPerDevice counts model FLOPs: causal attention halved, recomputation not counted.
	TFLOPsPerDevice Float `json:"tflops_per_device"`
	// MFU is the fraction of the device's peak, 0 to 1; Absent without a known peak, as on a CPU.
	MFU         Float `json:"mfu"`
	MemoryBytes int64 `json:"memory_bytes"` // peak of the device with the highest use
	// CommWaitSeconds is the time that compute waited for transfers, on the rank that waited longest.
	CommWaitSeconds Float `json:"comm_wait_seconds"`
	// AttentionImbalance is the visible pairs of the slowest rank over the mean, in the sequences of the group of ranks
	// with the largest difference; 1 if all are equal.
	AttentionImbalance Float `json:"attention_imbalance"`
	// AttentionBytes is the bytes of keys, values and their gradients sent by the rank that sends most.
	AttentionBytes Float `json:"attention_bytes"`
	// AuxLoss is the loss of balance without its coefficient, and ExpertImbalance the tokens of the expert with most over
	// the mean, in the layer where that is largest. nil without these.
	AuxLoss         *Float `json:"aux_loss,omitempty"`
	ExpertImbalance *Float `json:"expert_imbalance,omitempty"`
	ValLoss         *Float `json:"val_loss,omitempty"`   // nil on steps without validation
	EarlyStop       bool   `json:"early_stop,omitempty"` // the run ends with this step, before its last
	// Samples are answers of the model after the step.
	Samples []Sample `json:"samples,omitempty"`

	// ValLosses has the validation loss of each source if there are several, as val_loss/<name>.
	ValLosses map[string]Float `json:"-"`
}

// Sample is a prompt with the model's answer.
type Sample struct {
	Prompt string `json:"prompt"`
	Text   string `json:"text"` // the answer alone
}

const ofSource = "val_loss/"

// MarshalJSON writes the fields, and after them the losses of sources by name.
func (s Step) MarshalJSON() ([]byte, error) {
	type plain Step
	line, err := json.Marshal(plain(s))
	if err != nil || len(s.ValLosses) == 0 {
		return line, err
	}
	by := make(map[string]Float, len(s.ValLosses))
	for name, loss := range s.ValLosses {
		by[ofSource+name] = loss
	}
	more, err := json.Marshal(by)
	return slices.Concat(line[:len(line)-1], []byte(","), more[1:]), err
}

// UnmarshalJSON reads what MarshalJSON writes. Absent fields keep their values.
func (s *Step) UnmarshalJSON(line []byte) error {
	type plain Step
	err := json.Unmarshal(line, (*plain)(s))
	if err != nil || !bytes.Contains(line, []byte(`"`+ofSource)) {
		return err
	}
	var all map[string]json.RawMessage
	err = json.Unmarshal(line, &all)
	s.ValLosses = map[string]Float{}
	for key, value := range all {
		if name, ok := strings.CutPrefix(key, ofSource); ok && err == nil {
			var loss Float
			err = json.Unmarshal(value, &loss)
			s.ValLosses[name] = loss
		}
	}
	return err
}

// Writer takes the steps of a run in ascending order. It is not safe for concurrent use.
type Writer interface {
	Write(Step) error
	// Sync returns when steps written to a disk would survive a loss of power.
	Sync() error
	Close() error // writes everything and ends the file or server
}

// Options select the writers of a run.
type Options struct {
	Dir         *os.Root // run directory; the caller owns it and keeps it open
	Resumed     int64    // step of the checkpoint of a resumed run; 0 for a new run
	TensorBoard bool
	Config      string       // the resolved config for TensorBoard; "" for none
	Prometheus  string       // "host:port" to serve on, ":port" for loopback only, "" for none
	Warn        func(string) // receives warnings for the user; nil ignores them
}

// Open returns the writers of a run: metrics.jsonl and those in the options.
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

// multi writes to all its writers, even if one of them fails.
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

// PerSecond returns n / seconds, or Absent for zero seconds.
func PerSecond(n, seconds float64) Float {
	if !(seconds > 0) {
		return Absent
	}
	return Float(n / seconds)
}

// TFLOPs returns the speed of a step in TFLOP/s of each device. flops are the model FLOPs of the whole step over all
// devices.
func TFLOPs(flops, seconds float64, devices int) Float {
	return PerSecond(flops/1e12, seconds) / Float(devices)
}

// MFU returns the fraction of the device's peak, both in TFLOP/s; Absent if the peak is unknown (0), as on CPUs.
func MFU(tflopsPerDevice Float, peakTFLOPs float64) Float {
	if !(peakTFLOPs > 0) {
		return Absent
	}
	return tflopsPerDevice / Float(peakTFLOPs)
}

// etaDecay scales the weight of a step with each later one. About twenty steps count: enough to be steady, and few
// enough to follow changes.
const etaDecay = 0.95

// ETA averages step times with exponential decay. The zero value is ready. The sum of the weights divides the average,
// so the first steps are not biased towards zero.
type ETA struct{ sum, weight float64 }

// Add adds the seconds of one step. It ignores values that are not positive.
func (e ETA) Add(seconds float64) ETA {
	if !(seconds > 0) || math.IsInf(seconds, 0) {
		return e
	}
	return ETA{sum: e.sum*etaDecay + seconds, weight: e.weight*etaDecay + 1}
}

// StepSeconds returns the smoothed time of a step, Absent before the first.
func (e ETA) StepSeconds() Float { return PerSecond(e.sum, e.weight) }

// Left returns the time for the remaining steps, and false before the first step.
func (e ETA) Left(steps int64) (time.Duration, bool) {
	s := e.StepSeconds()
	if !s.Known() {
		return 0, false
	}
	left := float64(s) * float64(max(steps, 0)) * float64(time.Second)
	return time.Duration(min(left, math.MaxInt64/2)), true
}
