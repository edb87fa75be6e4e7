package command

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/job"
)

// BenchOptions are the flags that all benchmarks share.
type BenchOptions struct {
	Options
	JSON    string   // file to write the report to; "-" is standard output, in place of the tables
	Command []string // as given, for the report
}

// Bench measures attention, transfers or operations, and returns the exit status.
func Bench(ctx context.Context, task job.Bench, o BenchOptions) (int, error) {
	ranks, device, err := o.spawns()
	if err != nil {
		return 0, err
	}
	task.Machine = o.machine
	r := &bench.Report{Ranks: ranks, Machine: machineOf(o.machine)}
	switch {
	case task.Attention != nil:
		task.Attention.Default(device, ranks)
		if err = task.Attention.Load(); err == nil {
			err = o.chooseRows(&task, ranks, device)
		}
		r.Bench, r.Attention = "attention", &bench.Attention{Spec: *task.Attention}
	case task.Comm != nil:
		task.Comm.Default(device)
		r.Bench, err = "comm", task.Comm.Check(ranks)
	default:
		task.Ops = &bench.OpsSpec{}
		task.Ops.Default(device)
		r.Bench = "ops"
	}
	if err == nil {
		err = o.checkOutputs()
	}
	if err != nil {
		return 0, &InputError{err}
	}
	res, err := o.runWorkers(ctx, job.RoleBench, ranks, nil, func(string) any { return task },
		func(out *progress.Printer, e launch.Event) {
			var row job.BenchRow
			if e.Kind == job.EventBench && json.Unmarshal(e.Data, &row) == nil {
				add(r, row)
				out.Note(lineOf(&row))
			}
		})
	if err != nil {
		return 0, err
	}
	if res.ExitCode != launch.ExitDone && r.Rows() == 0 {
		return res.ExitCode, res.Err
	}
	bench.Compare(r.Ops)
	if err := o.present(r); err != nil { // with the rows before a failure
		return launch.ExitFailed, err
	}
	return res.ExitCode, res.Err
}

func add(r *bench.Report, row job.BenchRow) {
	switch {
	case row.Attention != nil:
		r.Attention.Rows = append(r.Attention.Rows, *row.Attention)
	case row.Packed != nil:
		r.Attention.Packed = append(r.Attention.Packed, *row.Packed)
	case row.Comm != nil:
		r.Comm = append(r.Comm, *row.Comm)
	case row.Ops != nil:
		r.Ops = append(r.Ops, *row.Ops)
	}
}

// lineOf returns the progress that a row means.
func lineOf(b *job.BenchRow) string {
	switch {
	case b.Attention != nil:
		return b.Attention.Line()
	case b.Packed != nil:
		return b.Packed.Line()
	case b.Comm != nil:
		return fmt.Sprintf("%s of %d bytes over %s: %.3g GB/s", b.Comm.Call, b.Comm.Bytes, b.Comm.Transport,
			b.Comm.GBps)
	case b.Ops != nil:
		return fmt.Sprintf("%s: %.3g %s", b.Ops.Name, b.Ops.Rate, b.Ops.Unit)
	}
	return ""
}

// machineOf describes the machine in a report.
func machineOf(m machine.Machine) bench.Machine {
	out := bench.Machine{Device: "cpu", Cores: runtime.NumCPU()}
	if m.IsCPU() {
		return out
	}
	out.Device, out.Arch, out.Versions = m.String(), m.Arch, make(map[string]string)
	if _, gpus, err := machine.Find(); err == nil && len(gpus) > 0 {
		out.Device = gpus[0].Name
	}
	for _, l := range machine.Libraries() {
		out.Versions[l.Name] = l.Version
	}
	return out
}

// checkOutputs finds that a file cannot be written before anything is measured.
func (o *BenchOptions) checkOutputs() error {
	dir := filepath.Dir(o.JSON) // "." of "" and of "-"
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return fmt.Errorf("--json: %s is not a directory", terminal.Name(dir))
	}
	return nil
}

// present writes a report as the flags ask.
func (o *BenchOptions) present(r *bench.Report) error {
	r.Command, r.Version, r.Date = o.Command, o.Version, time.Now().UTC().Truncate(time.Second)
	if o.JSON == "-" {
		if err := r.Encode(terminal.JSON(o.Stdout)); err != nil {
			return err
		}
	} else if err := r.Print(o.Stdout); err != nil {
		return err
	}
	if o.JSON == "" || o.JSON == "-" {
		return nil
	}
	if err := files.WriteTo(o.JSON, func(f *files.Draft) error { return r.Encode(f) }); err != nil {
		return fmt.Errorf("%s: %w", terminal.Name(o.JSON), err)
	}
	return nil
}
