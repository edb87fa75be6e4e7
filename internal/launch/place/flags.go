package place

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Flags are the command line's flags, and the name of the host.
type Flags struct {
	// NProc is --nproc; 0: not given, or auto.
	NProc int
	// Nodes is --nnodes, N or MIN:MAX; "": not given.
	Nodes string
	// NodeRank is --node-rank; -1: not given.
	NodeRank int
	// Rendezvous is --rendezvous; "": not given.
	Rendezvous string
	// Hostname is the name of this host.
	Hostname string
}

const maxNodes = maxHosts

// A request contains the validated flags.
type request struct {
	Flags
	least, most int // nodes; 0: not given
}

// parse validates the flags individually.
func (f Flags) parse() (request, error) {
	r := request{Flags: f}
	var err error
	if f.Nodes != "" {
		if r.least, r.most, err = nodeRange(f.Nodes); err != nil {
			return r, fmt.Errorf("--nnodes %s: %w", terminal.Name(f.Nodes), err)
		}
	}
	if f.NodeRank < -1 {
		return r, fmt.Errorf("--node-rank %d: want 0 for the first node, 1 for the next, and so on", f.NodeRank)
	}
	if f.Rendezvous != "" {
		if r.Rendezvous, err = address(f.Rendezvous, 0); err != nil {
			return r, fmt.Errorf("--rendezvous %s: %w", terminal.Name(f.Rendezvous), err)
		}
	}
	return r, nil
}

// nodeRange parses N or MIN:MAX.
func nodeRange(text string) (least, most int, err error) {
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	least, err1 := strconv.Atoi(first)
	most, err2 := strconv.Atoi(last)
	if err1 != nil || err2 != nil || least < 1 || most < least || most > maxNodes {
		return 0, 0, fmt.Errorf("want a number of nodes from 1 to %d, or MIN:MAX", maxNodes)
	}
	return least, most, nil
}

// A taskCounts contains a launcher's numbers of tasks, to check the flags against.
type taskCounts struct {
	by       string // the launcher, such as srun
	tasks    int
	evidence string // the variable with the number
	nodes    int    // 0: unknown
	node     int    // rank of this node; -1: unknown
	local    int    // tasks on this node
	even     bool   // all nodes have as many tasks
}

// checkFlags checks the flags against the started tasks, and returns the least number of agents: --nnodes MIN:MAX
// allows fewer nodes.
func (s taskCounts) checkFlags(want request) (least int, err error) {
	fail := func(flag, fix string, args ...any) (int, error) {
		return 0, fmt.Errorf("%s contradicts what %s has started: %d tasks (%s), %d on this node. Leave the flag "+
			"out, or %s",
			flag, s.by, s.tasks, s.evidence, s.local, fmt.Sprintf(fix, args...))
	}
	if want.NProc > 1 && s.local > 1 && want.NProc != s.local {
		return fail(fmt.Sprintf("--nproc %d", want.NProc), "start one task per node, which then has that many "+
			"processes")
	}
	if want.NodeRank >= 0 && s.node >= 0 && want.NodeRank != s.node {
		return fail(fmt.Sprintf("--node-rank %d", want.NodeRank), "pass this node's rank, %d", s.node)
	}
	switch {
	case want.Nodes == "":
		return s.tasks, nil
	case s.nodes == 0:
		return fail("--nnodes "+want.Nodes, "start equally many tasks on every node: otherwise the number of nodes is "+
			"unknown")
	case want.least > s.nodes || want.most < s.nodes:
		return fail(fmt.Sprintf("--nnodes %s, where there are %d nodes,", want.Nodes, s.nodes),
			"start tasks on that many nodes")
	case want.least < s.nodes && !s.even:
		return fail("--nnodes "+want.Nodes, "start equally many tasks on every node, so that the size without a "+
			"node is known")
	}
	return want.least * (s.tasks / s.nodes), nil
}

// Variable is an environment variable that Find reads.
type Variable struct {
	Name    string
	Meaning string // one line, for cprun doctor
}

// VariableList lists every variable that Find reads.
func VariableList() []Variable {
	list := []Variable{
		{envJobID, "Slurm's job"},
		{envJobNodes, "nodes of the job, for a note if a run uses only one of several"},
		{envStepID, "srun's step of this task; a batch shell has none"},
		{envStepTasks, "tasks of the step: one per node, or one per device"},
		{envStepNodes, "nodes of the step"},
		{envStepHosts, "their names, by rank"},
		{envStepCounts, "tasks on each of them"},
		{envStepPorts, "ports reserved by srun --resv-ports; the tasks meet at the first"},
		{envProcID, "this task's rank in the step; without it the process runs alone"},
		{envLocalID, "its rank on this node"},
		{envNodeID, "this node's rank in the step"},
		{envNodeName, "this node's name"},
		{envTasks, "tasks of the job, to detect a task that lost its other variables"},
		{envHetSize, "components of the job; steps of several tasks need a job of one component"},
		{envRestarts, "number of requeues of the job"},
		{envArrayJob, "the array of the job"},
		{envArrayTask, "its number in the array, to requeue it"},
		{envGPUsPerTask, "for a note if each task sees only one GPU"},
		{envVisible, "for the same note; also read by the CUDA driver"},
		{envMasterAddr, "host of rank 0, the rendezvous of nodes or tasks"},
		{envMasterPort, "port there; default 29500"},
		{envPetRendezvous, "rendezvous of the nodes, host:port; default port 29400"},
		{envPetMasterAddr, "as MASTER_ADDR, for torchrun's nodes"},
		{envPetMasterPort, "as MASTER_PORT, for torchrun's nodes"},
		{envPetNodes, "nodes, N or MIN:MAX, as torchrun reads it"},
		{envPetNodeRank, "this node's rank, as torchrun reads it"},
		{envPetProcesses, "processes per node, as torchrun reads it; --nproc overrides it"},
		{envNodes, "nodes, N or MIN:MAX, with MASTER_ADDR and NODE_RANK; --nnodes overrides it"},
		{envNodeRank, "this node's rank; --node-rank overrides it"},
		{envJobCompletion, "this pod's rank in an indexed Job of Kubernetes, if NODE_RANK is not set"},
		{envKubernetes, "to distinguish the operators of Kubernetes from scripts"},
		{envPMIxRank, "to detect a task of a launcher that does not give the number of tasks"},
		{envGroupRank, "this node's rank, for torchrun's workers"},
		{envElasticRun, "torchrun's id of the job"},
		{envElasticCount, "number of torchrun's restarts of its workers"},
		{envElasticStore, "True if torchrun itself listens at MASTER_PORT, so that cprun uses other ports"},
	}
	for _, l := range launchers() {
		list = append(list,
			Variable{l.rankVar, "this task's rank among those started by " + l.name},
			Variable{l.sizeVar, "the number of those tasks"},
			Variable{l.localRankVar, "this task's rank on this node"},
			Variable{l.localSizeVar, "tasks on this node"})
		for _, name := range l.id {
			list = append(list, Variable{name, "name of the job of " + l.name + ", to derive a port"})
		}
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(list, func(v Variable) bool {
		twice := seen[v.Name]
		seen[v.Name] = true
		return twice
	})
}

// maxText bounds a stored text variable, such as a name. Host lists have their own bound.
const maxText = 1024

// An env reads variables. An empty value counts as not set, as in other launchers.
type env struct {
	get func(name string) string
}

// text returns the trimmed value, "" if it is not set.
func (e env) text(name string) string { return strings.TrimSpace(e.get(name)) }

func (e env) has(names ...string) bool {
	for _, name := range names {
		if e.text(name) == "" {
			return false
		}
	}
	return true
}

// first returns the first set variable, and its text.
func (e env) first(names ...string) (name, text string) {
	for _, name := range names {
		if text := e.text(name); text != "" {
			return name, text
		}
	}
	return "", ""
}

// word returns the text of a variable with a name: printable and of bounded length.
func (e env) word(name string) (string, error) {
	v := e.text(name)
	if v != terminal.Name(v) || len(v) > maxText || strings.ContainsAny(v, " \t") {
		return "", fmt.Errorf("%s is not a valid name; unset it, or start this through its launcher", show(name, v))
	}
	return v, nil
}

// number returns a numeric variable from lo to hi.
func (e env) number(name string, lo, hi int) (int, error) {
	v := e.text(name)
	if v == "" {
		return 0, fmt.Errorf("%s is not set; start this through its launcher, which sets it, or unset the "+
			"launcher's other variables", name)
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < lo || n > hi {
		return 0, fmt.Errorf("%s: want a number from %d to %d; correct it, or unset it", show(name, v), lo, hi)
	}
	return n, nil
}

// optional returns a number that is used only in notes and messages; 0: not a number.
func (e env) optional(name string) int {
	n, err := strconv.Atoi(e.text(name))
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// A numbers value reads several numbers, up to the first error.
type numbers struct {
	env env
	err error
}

func (n *numbers) get(name string, lo, hi int) int {
	if n.err != nil {
		return 0
	}
	v, err := n.env.number(name, lo, hi)
	n.err = err
	return v
}

func show(name, value string) string { return name + "=" + terminal.Name(value) }

func set(name string, value int) string { return name + "=" + strconv.Itoa(value) }
