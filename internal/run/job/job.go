// Package job defines the messages between the launcher and the workers of a run: the roles, the tasks, and the
// events that workers send back. Both sides import it, neither the other.
package job

import (
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/text/data"
)

// A Role is the job of a worker.
type Role string

// The roles, which are arguments of the hidden command `cprun worker`.
const (
	RoleTrain     Role = "train"
	RoleAttention Role = "attention"
	RoleBench     Role = "bench"
	RoleEval      Role = "eval"
	RoleVerify    Role = "verify"
)

// Train is the task of the workers of a training run or an evaluation.
type Train struct {
	// Config is the text of the resolved config, since the file in the run directory may change.
	Config string `json:"config"`
	RunDir string `json:"run_dir"`
	// Data identifies the files of a training run, for its checkpoints.
	Data    *data.Identity `json:"data,omitempty"`
	From    string         `json:"from"` // the checkpoint to resume from; "": new weights
	Version string         `json:"version"`
	// RunID names the run on all nodes; "": each launcher's own.
	RunID string `json:"run_id,omitempty"`
	// Machine is the machine that the launcher found.
	Machine machine.Machine `json:"machine"`
	// HostData is the memory of a rank for data, by the plan.
	HostData int64 `json:"host_data,omitempty"`

	// Generation numbers the first start of this job's workers among all starts in the run directory. Each restart adds
	// one.
	Generation int64 `json:"generation,omitempty"`
	// World numbers the starts of a job of several nodes from 1, failed ones included; 0: use the number of restarts.
	World int64 `json:"world,omitempty"`

	NoSave   bool `json:"no_save,omitempty"`  // write no checkpoint
	LogProbs bool `json:"logprobs,omitempty"` // an evaluation of the tokens of records

	// Whole is the length of the samples of a verification; data.seq_len is the length of their checked prefix.
	Whole int  `json:"whole,omitempty"`
	Leak  bool `json:"leak,omitempty"` // a verification probes the masks
	// Routes is the directory of another side of a verification, whose choices of experts this one takes.
	Routes string `json:"routes,omitempty"`
}

// EventNotice carries a line for the user, EventValidation a validation loss before training, EventOutput a piece of
// text for stdout.
const (
	EventNotice     = "notice"
	EventValidation = "validation"
	EventOutput     = "output"
)

// EventBench carries a bench.Row from rank 0.
const EventBench = "bench"

// EventReport carries an attend.Report, a train.Evaluation or a train.Verified from rank 0.
const EventReport = "report"
