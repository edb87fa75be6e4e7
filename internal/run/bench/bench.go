// Package bench measures attention over ranks, transfers, single operations and training steps on any device. A Report
// holds the results, as tables and JSON. Figures are medians over iterations, by the device's own clock, of the slowest
// rank. Every rank runs a Task, and the rows of one of them make the report:
//
//	r := &bench.Rank{Device: dev, World: group, Control: group}
//	err := r.Run(ctx, &bench.Task{Comm: &bench.CommSpec{Sizes: []int{1 << 20}, Calls: bench.Calls}}, emit)
package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
)

// Task is the task of the ranks of a benchmark. One of the last four fields is set.
type Task struct {
	Machine   machine.Machine `json:"machine"` // that the launcher found
	Attention *AttentionSpec  `json:"attention,omitempty"`
	Comm      *CommSpec       `json:"comm,omitempty"`
	Ops       *OpsSpec        `json:"ops,omitempty"`
	Calibrate *CalibrateSpec  `json:"calibrate,omitempty"`
}

// A Row holds the results of a Task since the previous row: one of Attention, Packed, Comm, Ops and Calibrate is set.
type Row struct {
	Attention *AttentionRow `json:"attention,omitempty"`
	Packed    *PackedRow    `json:"packed,omitempty"`
	Comm      *Transfer     `json:"comm,omitempty"`
	Ops       *Operation    `json:"ops,omitempty"`
	Calibrate *cost.Set     `json:"calibrate,omitempty"`
}

// Run measures a task and passes each row to emit. Every rank calls it; the rows of rank 0 count.
func (r *Rank) Run(ctx context.Context, t *Task, emit func(Row) error) (err error) {
	defer device.Caught(&err)
	switch {
	case t.Attention != nil:
		return r.attention(ctx, t.Attention, emit)
	case t.Comm != nil:
		return r.comm(ctx, t.Comm, func(row Transfer) error { return emit(Row{Comm: &row}) })
	case t.Ops != nil:
		return r.ops(ctx, t.Ops, emit)
	}
	return r.calibrate(ctx, t.Calibrate, emit)
}

// Report is the result of `cprun bench`, as --json writes it. Bench names the one of Attention, Comm, Train and Ops
// that is set.
type Report struct {
	Bench   string       `json:"bench"`   // attention, comm, train, ops
	Command []string     `json:"command"` // the command line, without the program
	Version string       `json:"version"` // of cprun
	Date    time.Time    `json:"date"`
	Ranks   int          `json:"ranks"`
	Machine cost.Machine `json:"machine"` // of rank 0

	Attention *Attention  `json:"attention,omitempty"`
	Comm      []Transfer  `json:"comm,omitempty"`
	Train     *Training   `json:"train,omitempty"`
	Ops       []Operation `json:"ops,omitempty"`

	Costs cost.Set `json:"-"` // of `bench calibrate`, which reports a cost table
}

// Add adds a row and returns it in one line, for progress.
func (r *Report) Add(row Row) string {
	switch {
	case row.Attention != nil:
		r.Attention.Rows = append(r.Attention.Rows, *row.Attention)
		return row.Attention.line()
	case row.Packed != nil:
		r.Attention.Packed = append(r.Attention.Packed, *row.Packed)
		return row.Packed.line()
	case row.Comm != nil:
		r.Comm = append(r.Comm, *row.Comm)
		return fmt.Sprintf("%s of %d bytes over %s: %s GB/s", row.Comm.Call, row.Comm.Bytes, row.Comm.Transport,
			readable.Number(row.Comm.GBps))
	case row.Ops != nil:
		r.Ops = append(r.Ops, *row.Ops)
		return fmt.Sprintf("%s: %s %s", row.Ops.Name, readable.Number(row.Ops.Rate), row.Ops.Unit)
	case row.Calibrate != nil:
		set, more := &r.Costs, row.Calibrate
		set.Attention, set.Products = append(set.Attention, more.Attention...), append(set.Products, more.Products...)
		set.Passes, set.Links = append(set.Passes, more.Passes...), append(set.Links, more.Links...)
		set.CallSeconds = max(set.CallSeconds, more.CallSeconds)
		return fmt.Sprintf("%d ranks: measured %d attention calls, %d matmuls, %d elementwise operations, %d transfers",
			r.Ranks, len(set.Attention), len(set.Products), len(set.Passes), len(set.Links))
	}
	return ""
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

// Tables returns the report for a terminal.
func (r *Report) Tables() []readable.Table {
	on := fmt.Sprintf("%d x %s", r.Ranks, r.Machine.Device)
	switch {
	case r.Attention != nil && len(r.Attention.Packed) > 0:
		return []readable.Table{r.Attention.packTable(on)}
	case r.Attention != nil:
		return r.Attention.tables(on)
	case r.Train != nil:
		return []readable.Table{r.Train.table(on)}
	case r.Comm != nil:
		return []readable.Table{transferTable(on, r.Comm)}
	}
	return []readable.Table{operationTable(r.Machine.Device, r.Ops)}
}
