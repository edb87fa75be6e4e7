// Package job defines the messages between the launcher and the workers of a run: the roles, the tasks, and the
// events that workers send back. Both sides import it, neither the other.
package job

import (
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
)

// A Role is the job of a worker.
type Role string

// The roles, which are arguments of the hidden command `cprun worker`.
const (
	RoleTrain     Role = "train"
	RoleAttention Role = "attention"
	RoleBench     Role = "bench"
	RoleEval      Role = "eval"
)

// Train is the task of the workers of a training run or an evaluation.
type Train struct {
	// Config is the resolved config itself: the file in the run directory may be changed by then.
	Config  string `json:"config"`
	RunDir  string `json:"run_dir"`
	From    string `json:"from"` // the checkpoint to go on from; "": new weights
	Version string `json:"version"`
	// RunID names the run on all nodes; "": the launcher's own name for it.
	RunID string `json:"run_id,omitempty"`
	// Machine runs the ranks, as the launcher found it.
	Machine machine.Machine `json:"machine"`
	// Remedies are needed by the chosen backend.
	Remedies []backends.RemedyKind `json:"remedies,omitempty"`

	// Generation is the number of the first start of this job's workers among all of its run directory;
	// each restart counts one further.
	Generation int64 `json:"generation,omitempty"`
	// World counts the starts of a job of several nodes from 1, including failed ones; 0: the restarts count.
	World int64 `json:"world,omitempty"`

	NoSave bool `json:"no_save,omitempty"` // write no checkpoint: the run is a measurement
}

// EventNotice is a line for the user, from a worker; EventValidation a validation loss
// before training.
const (
	EventNotice     = "notice"
	EventValidation = "validation"
)

// Bench is the task of the workers of a benchmark; one of the last four is set.
type Bench struct {
	Machine   machine.Machine       `json:"machine"`
	Remedies  []backends.RemedyKind `json:"remedies,omitempty"` // of attention
	Attention *bench.AttentionSpec  `json:"attention,omitempty"`
	Comm      *bench.CommSpec       `json:"comm,omitempty"`
	Ops       *bench.OpsSpec        `json:"ops,omitempty"`
	Calibrate *bench.CalibrateSpec  `json:"calibrate,omitempty"`
}

// EventBench carries a BenchRow of rank 0.
const EventBench = "bench"

// A BenchRow holds the results of a benchmark since the row before. The field of that benchmark is set:
// Attention, Packed, Comm, Ops or Calibrate.
type BenchRow struct {
	Attention *bench.AttentionRow `json:"attention,omitempty"`
	Packed    *bench.PackedRow    `json:"packed,omitempty"`
	Comm      *bench.Transfer     `json:"comm,omitempty"`
	Ops       *bench.Operation    `json:"ops,omitempty"`
	Calibrate *cost.Set           `json:"calibrate,omitempty"`
}

// EventReport carries the attend.Report of rank 0, or the train.Evaluation.
const EventReport = "report"
