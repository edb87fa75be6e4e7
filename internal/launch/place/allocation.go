package place

import (
	"fmt"
	"regexp"
)

// Slurm's variables.
const (
	envJobID       = "SLURM_JOB_ID"
	envJobNodes    = "SLURM_JOB_NUM_NODES"
	envStepID      = "SLURM_STEP_ID"
	envStepTasks   = "SLURM_STEP_NUM_TASKS"
	envStepNodes   = "SLURM_STEP_NUM_NODES"
	envStepHosts   = "SLURM_STEP_NODELIST"
	envStepCounts  = "SLURM_STEP_TASKS_PER_NODE"
	envStepPorts   = "SLURM_STEP_RESV_PORTS"
	envProcID      = "SLURM_PROCID"
	envLocalID     = "SLURM_LOCALID"
	envNodeID      = "SLURM_NODEID"
	envNodeName    = "SLURMD_NODENAME"
	envTasks       = "SLURM_NTASKS"
	envHetSize     = "SLURM_HET_SIZE"
	envRestarts    = "SLURM_RESTART_COUNT"
	envArrayJob    = "SLURM_ARRAY_JOB_ID"
	envArrayTask   = "SLURM_ARRAY_TASK_ID"
	envGPUsPerTask = "SLURM_GPUS_PER_TASK"
	envVisible     = "CUDA_VISIBLE_DEVICES"
)

// An allocation is what Slurm has given to a job.
type allocation struct {
	job      string // its id, "" where there is no Slurm
	control  string // what scontrol takes for it
	nodes    int    // 0: not told
	restarts int
	onNode   bool  // this process runs on a node of it, as far as Slurm tells
	step     *step // of srun, nil where this is no task
}

// jobNumber and jobID are what scontrol takes for a job, and also for a task of an array.
var (
	jobNumber = regexp.MustCompile(`^[0-9]{1,18}$`)
	jobID     = regexp.MustCompile(`^[0-9]{1,18}(_[0-9]{1,18})?$`)
)

// findAllocation reads Slurm's variables.
func findAllocation(e env) (a allocation, err error) {
	id := e.text(envJobID)
	if id == "" {
		return a, lostTask(e)
	}
	if !jobNumber.MatchString(id) {
		return a, fmt.Errorf("%s: want Slurm's number of a job; unset it, or start this through Slurm",
			show(envJobID, id))
	}
	a = allocation{job: id, control: id, nodes: e.guess(envJobNodes), restarts: e.guess(envRestarts),
		onNode: e.has(envNodeName)}
	if array := e.text(envArrayJob) + "_" + e.text(envArrayTask); jobID.MatchString(array) {
		a.control = array
	}
	a.step, err = findStep(e, a)
	return a, err
}

// lostTask refuses a task of Slurm that lost a part of its environment: it would train beside others. The
// shell of a batch job has the variables of task 0 as well, and is none.
func lostTask(e env) error {
	ofStep := e.guess(envStepTasks)
	shell := e.has(envJobID) && e.text(envProcID) == "0" && ofStep < 2
	if max(ofStep, e.guess(envTasks)) < 2 || !e.has(envProcID) || shell {
		return nil
	}
	missing := envJobID
	if e.has(missing) {
		missing = envStepID
	}
	tasks, _ := e.first(envStepTasks, envTasks)
	return fmt.Errorf("%s and %s are set, and %s is not that of a step: this looks like one of several tasks of "+
		"Slurm that lost its environment. %s",
		show(envProcID, e.text(envProcID)), show(tasks, e.text(tasks)), show(missing, e.text(missing)), offer)
}

// mark adds to a place what Slurm says of the job, whoever has started this process inside it.
func (a allocation) mark(p *Place) {
	if a.job == "" {
		return
	}
	p.SlurmJob = a.control
	p.Restart = max(p.Restart, a.restarts)
	if a.step != nil && a.step.name != "" {
		p.Node = a.step.name
	}
	if p.Several() {
		return
	}
	p.Job = a.label()
	switch {
	case a.nodes > 1:
		p.note("Slurm's job %s has %d nodes, and this run uses one. To train on all, start it with srun: srun "+
			"--ntasks-per-node=1 cprun ...", a.job, a.nodes)
	case !a.onNode:
		p.note("this is a shell of Slurm's job %s, which need not run on its node (%s is not set): start the run "+
			"with srun", a.job, envNodeName)
	}
}

// label names the job, or the step, as one start of it.
func (a allocation) label() string {
	id := a.job
	if a.step != nil {
		id += "." + a.step.id
	}
	return fmt.Sprintf("%s:%s:%d", Slurm, id, a.restarts)
}
