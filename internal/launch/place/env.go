package place

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// maxText bounds a stored text variable, such as a name. Host lists have their own bound.
const maxText = 1024

// An env reads variables, and keeps the first error. An empty value counts as not set, as in other launchers.
type env struct {
	get func(name string) string
	err error
}

func (e *env) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format, args...)
	}
}

// text returns the trimmed value, "" if it is not set.
func (e *env) text(name string) string { return strings.TrimSpace(e.get(name)) }

func (e *env) has(names ...string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { return e.text(name) == "" })
}

// first returns the first set variable, and its text.
func (e *env) first(names ...string) (name, text string) {
	for _, name := range names {
		if text := e.text(name); text != "" {
			return name, text
		}
	}
	return "", ""
}

// word returns the text of a variable with a name: printable and of bounded length.
func (e *env) word(name string) string {
	v := e.text(name)
	if v != terminal.Name(v) || strings.ContainsAny(v, " \t") {
		e.fail("%s is not a valid name; unset it, or start this through its launcher", show(name, terminal.Clip(v, 80)))
	}
	return v
}

// number returns a number in a range. If there is none, number fails and returns lo.
func (e *env) number(name string, lo, hi int) int {
	v := e.text(name)
	n, err := strconv.Atoi(v)
	switch {
	case v == "":
		e.fail("%s is not set; start this through its launcher, which sets it, or unset the launcher's other variables",
			name)
	case err != nil || n < lo || n > hi:
		e.fail("%s: want a number from %d to %d; correct it, or unset it", show(name, v), lo, hi)
	default:
		return n
	}
	return lo
}

// optional returns a number, or 0 if it is none or negative.
func (e *env) optional(name string) int {
	n, _ := strconv.Atoi(e.text(name))
	return max(n, 0)
}

// show formats a variable of any text.
func (e *env) show(name string) string { return show(name, e.text(name)) }

func show(name, value string) string { return name + "=" + terminal.Name(value) }

func set(name string, value int) string { return name + "=" + strconv.Itoa(value) }

// Variable is an environment variable that Find reads.
type Variable struct {
	Name    string
	Meaning string // one line, for cprun doctor
}

// VariableList lists every variable that Find reads.
func VariableList() (list []Variable) {
	add := func(meaning string, names ...string) {
		for _, name := range names {
			list = append(list, Variable{name, meaning})
		}
	}
	add("Slurm's job, and the number of its requeues", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
	add("the task of an array, to requeue it", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
	add("srun's step of this task; a batch shell has none", "SLURM_STEP_ID")
	add("tasks and nodes of the step", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST",
		"SLURM_STEP_TASKS_PER_NODE")
	add("ports reserved by srun --resv-ports; the tasks meet at the first", "SLURM_STEP_RESV_PORTS")
	add("this task's rank in the step; without it the process runs alone", "SLURM_PROCID")
	add("this task's rank on its node, and its node", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME")
	add("nodes and tasks of the job, to detect a task that lost its other variables, or a run that uses one node of "+
		"several", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS")
	add("components of the job; steps of several tasks need a job of one component", "SLURM_HET_SIZE")
	add("for a note if each task sees only one GPU", "CUDA_VISIBLE_DEVICES")
	add("host of rank 0, the rendezvous of nodes or tasks; the port is 29500 by default", "MASTER_ADDR", "MASTER_PORT",
		"PET_MASTER_ADDR", "PET_MASTER_PORT")
	add("rendezvous of torchrun's nodes, host:port; default port 29400", "PET_RDZV_ENDPOINT")
	add("nodes, N or MIN:MAX; --nnodes overrides it", "NNODES", "PET_NNODES")
	add("this node's rank; --node-rank overrides it", "NODE_RANK", "PET_NODE_RANK")
	add("processes per node, as torchrun reads it; --nproc overrides it", "PET_NPROC_PER_NODE")
	add("this pod's rank in an indexed Job of Kubernetes, if NODE_RANK is not set", "JOB_COMPLETION_INDEX")
	add("to distinguish the operators of Kubernetes from scripts", "KUBERNETES_SERVICE_HOST")
	add("to detect a task of a launcher that does not give the number of tasks", "PMIX_RANK")
	add("this node's rank, for torchrun's workers", "GROUP_RANK")
	add("True if torchrun itself listens at MASTER_PORT, so that cprun uses other ports", "TORCHELASTIC_USE_AGENT_STORE")
	for _, l := range launchers() {
		add("rank and number of the tasks of "+l.name+", and the same on this node", l.rankVar, l.sizeVar, l.localVar,
			l.localsVar)
		add("name of the job of "+l.name+", to derive a port", l.id...)
	}
	return list
}
