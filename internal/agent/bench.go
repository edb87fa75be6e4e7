package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/bench"
	"github.com/cprun/cprun/internal/launch"
)

// BenchJob is what the workers of a benchmark are told; one of the last three is set.
type BenchJob struct {
	Machine   backend.Machine      `json:"machine"`
	Attention *bench.AttentionSpec `json:"attention,omitempty"`
	Comm      *bench.CommSpec      `json:"comm,omitempty"`
	Ops       *bench.OpsSpec       `json:"ops,omitempty"`
}

// EventBench carries a BenchRow of rank 0.
const EventBench = "bench"

// BenchRow is what a benchmark has found since the row before; one field is set.
type BenchRow struct {
	Attention *bench.AttentionRow `json:"attention,omitempty"`
	Comm      *bench.Transfer     `json:"comm,omitempty"`
	Ops       *bench.Operation    `json:"ops,omitempty"`
}

// BenchOptions are the flags that all benchmarks share.
type BenchOptions struct {
	Options
	JSON    string   // file to write the report to; "-" is standard output, in place of the tables
	Plot    string   // file to draw the chart to
	Command []string // as given, for the report
}

// Bench measures attention, transfers or operations, and returns the exit status.
func Bench(ctx context.Context, job BenchJob, o BenchOptions) (int, error) {
	ranks, device, err := o.resolve()
	if err != nil {
		return 0, err
	}
	job.Machine = o.machine
	r := &bench.Report{Ranks: ranks, Machine: machineOf(o.machine)}
	switch {
	case job.Attention != nil:
		job.Attention.Default(device)
		if err = job.Attention.Check(ranks); err == nil {
			err = o.chooseBackend(job.Attention, ranks)
		}
		r.Bench, r.Attention = "attention", &bench.Attention{Spec: *job.Attention}
	case job.Comm != nil:
		job.Comm.Default(device)
		r.Bench, err = "comm", job.Comm.Check(ranks)
	default:
		job.Ops = &bench.OpsSpec{}
		job.Ops.Default(device)
		r.Bench = "ops"
	}
	if err == nil {
		err = o.checkOutputs()
	}
	if err != nil {
		return 0, &InputError{err}
	}
	logs, err := os.MkdirTemp("", "cprun-bench-")
	if err != nil {
		return 0, fmt.Errorf("log directory: %w", err)
	}
	out := o.printer()
	res := launch.Run(ctx, launch.Job{
		NProc: ranks, Argv: []string{"worker", string(RoleBench)}, LogDir: logs, Payload: payload(job),
		Stderr: out, Show: o.show(),
		OnEvent: func(_ int, e launch.Event) {
			var row BenchRow
			if e.Kind == EventBench && json.Unmarshal(e.Data, &row) == nil {
				add(r, row)
				out.Note(row.line())
			}
		},
	})
	out.Close()
	if res.ExitCode == launch.ExitDone {
		os.RemoveAll(logs) // those of a failure stay, since its report names them
	}
	if res.ExitCode != launch.ExitDone && r.Rows() == 0 {
		return res.ExitCode, res.Err
	}
	if err := o.present(r); err != nil { // what was found before a failure too
		return launch.ExitFailed, err
	}
	return res.ExitCode, res.Err
}

func add(r *bench.Report, row BenchRow) {
	switch {
	case row.Attention != nil:
		r.Attention.Rows = append(r.Attention.Rows, *row.Attention)
	case row.Comm != nil:
		r.Comm = append(r.Comm, *row.Comm)
	case row.Ops != nil:
		r.Ops = append(r.Ops, *row.Ops)
	}
}

// line is the progress that a row means.
func (b *BenchRow) line() string {
	switch {
	case b.Attention != nil:
		return b.Attention.Line()
	case b.Comm != nil:
		return fmt.Sprintf("%s of %d bytes over %s: %.3g GB/s", b.Comm.Call, b.Comm.Bytes, b.Comm.Transport, b.Comm.GBps)
	case b.Ops != nil:
		return fmt.Sprintf("%s: %.3g %s", b.Ops.Name, b.Ops.Rate, b.Ops.Unit)
	}
	return ""
}

// chooseBackend decides what computes the longest sequence, and uses it for all.
func (o *BenchOptions) chooseBackend(s *bench.AttentionSpec, ranks int) error {
	m := o.machine
	dtype, err := bench.DType(s.DType, m.Arch == 0)
	if err != nil {
		return err
	}
	want, err := attention.ParseBackend(s.Backend)
	if err != nil {
		return fmt.Errorf("--backend: %w", err)
	}
	env, err := launch.Attention()
	if err != nil {
		return err
	}
	right := -1
	if s.Causal {
		right = 0
	}
	choice, err := attention.Select(attention.Params{
		Arch: m.Arch, CUDNN: m.CUDNN, Flash: m.Flash, Memory: m.Memory, Want: want,
		Disabled: backend.Disabled(env.NoFlash, env.NoFused, env.NoUnfused),
		DType:    dtype, Format: attention.BSHD, Packing: attention.Separate, Contiguous: true,
		Batch: 1, SeqQ: slices.Max(s.Seq), SeqKV: slices.Max(s.Seq), Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, HeadDimV: s.HeadDim,
		Causal: s.Causal, WindowLeft: s.Window, WindowRight: right, Softmax: attention.Vanilla, Bias: attention.NoBias,
		Training: true, Deterministic: s.Deterministic, ContextSize: ranks, Algorithm: s.Algorithms[0], Layout: s.Layout,
	})
	if err != nil {
		return err
	}
	s.Backend = choice.Backend.String()
	return nil
}

// machineOf is what a report tells of the machine.
func machineOf(m backend.Machine) bench.Machine {
	out := bench.Machine{Device: "cpu", Cores: runtime.NumCPU()}
	if m.Arch == 0 {
		return out
	}
	out.Device, out.Versions = m.String(), make(map[string]string)
	if _, gpus, err := backend.Find(); err == nil && len(gpus) > 0 {
		out.Device = gpus[0].Name
	}
	for _, l := range backend.Libraries() {
		out.Versions[l.Name] = l.Version
	}
	return out
}

// checkOutputs finds that a file cannot be written before anything is measured.
func (o *BenchOptions) checkOutputs() error {
	for _, f := range []struct{ flag, path string }{{"--json", o.JSON}, {"--plot", o.Plot}} {
		if f.path == "" || f.path == "-" {
			continue
		}
		if info, err := os.Stat(filepath.Dir(f.path)); err != nil || !info.IsDir() {
			return fmt.Errorf("%s: %s is not a directory", f.flag, filepath.Dir(f.path))
		}
		if ext := filepath.Ext(f.path); f.flag == "--plot" && ext != "" && !strings.EqualFold(ext, ".svg") {
			return fmt.Errorf("--plot %s: charts are drawn as SVG; name it %s.svg", f.path, strings.TrimSuffix(f.path, ext))
		}
	}
	return nil
}

// present writes a report where the flags ask for it.
func (o *BenchOptions) present(r *bench.Report) error {
	r.Command, r.Version, r.Date = o.Command, o.Version, time.Now().UTC().Truncate(time.Second)
	if o.JSON == "-" {
		if err := r.Encode(o.Stdout); err != nil {
			return err
		}
	} else if err := r.Print(o.Stdout); err != nil {
		return err
	}
	for path, write := range map[string]func(io.Writer) error{o.JSON: r.Encode, o.Plot: r.Draw} {
		if path == "" || path == "-" {
			continue
		}
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		if err := errors.Join(write(f), f.Close()); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}
