package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/ring"
)

// Calibrate measures this machine's cost table, shows it and keeps it, and returns the exit status.
func Calibrate(ctx context.Context, o BenchOptions) (int, error) {
	most, device, err := o.spawns()
	if err != nil {
		return 0, err
	}
	if err := o.checkOutputs(); err != nil {
		return 0, &InputError{err}
	}
	numbers := []int{most}
	if device == "cpu" && o.NProc == "auto" {
		numbers = []int{1, runtime.NumCPU(), 2 * runtime.NumCPU()}
	}
	t := &cost.Table{
		Version: cost.Version, Machine: costMachine(o.machine), Program: o.Version,
		Date:    time.Now().UTC().Format(time.RFC3339),
		Command: "cprun " + strings.Join(o.Command, " "), Source: "measured",
	}
	if t.Machine.Count = min(o.machine.GPUs, most); device == "cpu" {
		t.CoreGFLOPs = matmulRate()
	}
	began, turns := time.Now(), 1
	if device == "cpu" {
		turns = cpuTurns
	}
	for turn := range turns {
		for i, ranks := range numbers {
			set := cost.Set{Ranks: ranks}
			if code, err := o.measureSet(ctx, device, &set, ranks > runtime.NumCPU() && len(numbers) > 1); code != 0 ||
				err != nil {
				return code, err
			}
			if turn == 0 {
				t.Sets = append(t.Sets, set)
			} else {
				t.Sets[i].KeepLess(&set)
			}
		}
	}
	return o.keep(t, time.Since(began))
}

// cpuTurns is how often all figures of a CPU are measured, one set after another. Its cores have others to serve, too,
// some for seconds.
const cpuTurns = 3

// measureSet measures all figures of a set. Ranks that share cores compute as much slower as they are more, so that of
// them transfers are enough: how they wait for each other is another matter.
func (o *BenchOptions) measureSet(ctx context.Context, device string, set *cost.Set, share bool) (int, error) {
	for i, name := range costBackends(o.machine) {
		s := &bench.CalibrateSpec{}
		s.Default(device)
		s.Backend, s.Operations = name, i == 0
		if device == "cpu" {
			s.Share(runtime.NumCPU() / set.Ranks)
			s.TransfersOnly = share
		}
		if code, err := o.calibrate(ctx, set.Ranks, s, set); code != 0 || err != nil {
			return code, err
		}
	}
	return 0, nil
}

// costBackends lists the backends of attention that this machine runs, the fastest first.
func costBackends(m machine.Machine) []string {
	if !m.IsCPU() && m.CUDNN != 0 {
		return []string{"fused", "flash"}
	}
	return []string{"flash"}
}

// calibrate runs the processes of one measurement, and adds their results to the set.
func (o *BenchOptions) calibrate(ctx context.Context, ranks int, s *bench.CalibrateSpec, set *cost.Set) (int, error) {
	task := job.Bench{Machine: o.machine, Calibrate: s}
	dtype, err := bench.DType(s.DType, o.machine.IsCPU())
	if err != nil {
		return 0, &InputError{err}
	}
	choice, err := backend.Select(o.machine, 0, backend.Request{
		Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: s.Backend},
		Of:       "calibration", DType: dtype, Batch: 1, SeqQ: s.Sizes[0], SeqKV: s.Sizes[0],
		Heads: s.Heads, KVHeads: s.KVHeads,
		HeadDim: s.Dims[0], HeadDimV: s.Dims[0], Causal: true, Window: -1, Training: true, Ranks: 1,
	})
	if err != nil {
		return 0, &InputError{err}
	}
	task.Remedies = choice.Kinds()
	res, err := o.runWorkers(ctx, job.RoleBench, ranks, nil, func(string) any { return task },
		func(out *progress.Printer, e launch.Event) {
			var row job.BenchRow
			if e.Kind == job.EventBench && json.Unmarshal(e.Data, &row) == nil && row.Calibrate != nil {
				merge(set, row.Calibrate)
				out.Note(fmt.Sprintf("%d ranks: %d calls of attention, %d products, %d passes, %d transfers",
					ranks, len(set.Attention), len(set.Products), len(set.Passes), len(set.Links)))
			}
		})
	return res.ExitCode, errors.Join(err, res.Err)
}

// merge adds the parts that b has to a.
func merge(a, b *cost.Set) {
	a.Attention, a.Products = append(a.Attention, b.Attention...), append(a.Products, b.Products...)
	a.Passes, a.Links = append(a.Passes, b.Passes...), append(a.Links, b.Links...)
	a.CallSeconds = max(a.CallSeconds, b.CallSeconds)
}

// keep shows a table, and stores it.
func (o *BenchOptions) keep(t *cost.Table, took time.Duration) (int, error) {
	if o.JSON == "-" {
		if err := t.Encode(terminal.JSON(o.Stdout)); err != nil {
			return launch.ExitFailed, err
		}
	} else {
		for i, table := range bench.CostTables(t) {
			if i > 0 {
				fmt.Fprintln(o.Stdout)
			}
			if _, err := table.WriteTo(o.Stdout); err != nil {
				return launch.ExitFailed, err
			}
		}
	}
	path, err := t.Keep()
	if err == nil && o.JSON != "" && o.JSON != "-" {
		err = files.WriteTo(o.JSON, func(f *files.Draft) error { return t.Encode(f) })
	}
	if err != nil {
		return launch.ExitFailed, fmt.Errorf("cost table: %w", err)
	}
	if !o.Quiet {
		fmt.Fprintf(o.Stderr, "measured in %.0f s; kept in %s, where cprun plan looks\n", took.Seconds(),
			terminal.Name(path))
	}
	return 0, nil
}

// costMachine describes a machine to a cost table.
func costMachine(m machine.Machine) cost.Machine {
	of := machineOf(m)
	c := cost.Machine{Device: of.Device, Arch: m.Arch, Cores: of.Cores, Count: m.GPUs, Versions: of.Versions}
	if m.IsCPU() {
		c.Device = machine.CPUName()
	}
	return c
}
