package place

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// srunHint ends messages about inconsistent variables of Slurm.
const srunHint = "Start cprun with srun itself, and pass the environment on (--export=ALL); for a separate run on " +
	"this node, env -u SLURM_PROCID cprun"

// specialSteps is the first id of batch shells, interactive shells and similar steps. The steps of srun have lower ids.
const specialSteps = 0xfffffff0

var (
	arrayTask   = regexp.MustCompile(`^[0-9]{1,18}_[0-9]{1,18}$`)
	firstNumber = regexp.MustCompile(`[0-9]+`)
)

// An allocation describes the job of Slurm around this process.
type allocation struct {
	job     string // its id, "" if there is no Slurm
	label   string // of the job or step, and its restart
	control string // its name for scontrol
	node    string // of a task
	nodes   int    // 0: unknown
	onNode  bool   // this process runs on one of its nodes, according to Slurm
	step    *task  // one of several tasks of srun, or nil
}

func (e *env) allocation() (a allocation) {
	id := e.text("SLURM_JOB_ID")
	if id == "" {
		e.lostTask()
		return a
	}
	job, err := digits(id)
	if err != nil {
		e.fail("%s: want Slurm's number of a job; unset it, or start this through Slurm", show("SLURM_JOB_ID", id))
	}
	a = allocation{job: id, control: id, nodes: e.optional("SLURM_JOB_NUM_NODES"), onNode: e.has("SLURMD_NODENAME")}
	if array := e.text("SLURM_ARRAY_JOB_ID") + "_" + e.text("SLURM_ARRAY_TASK_ID"); arrayTask.MatchString(array) {
		a.control = array
	}
	step, err := strconv.ParseUint(e.text("SLURM_STEP_ID"), 10, 32)
	switch {
	case err != nil || step >= specialSteps:
		e.lostTask()
	case e.has("SLURM_PROCID"):
		id += "." + strconv.FormatUint(step, 10)
		a.node = e.word("SLURMD_NODENAME")
		a.step = e.stepTask(a.node, stepPort(job, step))
	}
	a.label = fmt.Sprintf("%s:%s:%d", Slurm, id, e.optional("SLURM_RESTART_COUNT"))
	if a.step != nil {
		a.step.job = a.label
	}
	return a
}

// lostTask refuses a task of Slurm that lost a part of its environment: it would train separately. The shell of a batch
// job also has the variables of task 0, and is not refused.
func (e *env) lostTask() {
	const ofStep, ofJob = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"
	shell := e.has("SLURM_JOB_ID") && e.text("SLURM_PROCID") == "0" && e.optional(ofStep) < 2
	if max(e.optional(ofStep), e.optional(ofJob)) < 2 || !e.has("SLURM_PROCID") || shell {
		return
	}
	tasks, _ := e.first(ofStep, ofJob)
	missing := "SLURM_JOB_ID"
	if e.has(missing) {
		missing = "SLURM_STEP_ID"
	}
	e.fail("%s and %s are set, and %s is not that of a step: this looks like one of several tasks of Slurm that lost "+
		"its environment. %s", e.show("SLURM_PROCID"), e.show(tasks), e.show(missing), srunHint)
}

// stepTask reads the variables of a task of srun; nil: the step has one task.
func (e *env) stepTask(node string, port int) *task {
	t := &task{
		launcher: launcher{source: Slurm, name: "srun", rankVar: "SLURM_PROCID", sizeVar: "SLURM_STEP_NUM_TASKS"},
		port:     port, host: node,
	}
	if t.size = e.number(t.sizeVar, 1, maxTasks); t.size == 1 {
		return nil
	}
	if size := e.optional("SLURM_HET_SIZE"); size > 1 {
		e.fail("%s: cprun does not support heterogeneous jobs. Submit the training nodes as a job of one component",
			set("SLURM_HET_SIZE", size))
	}
	t.nodes = e.number("SLURM_STEP_NUM_NODES", 1, maxNodes)
	t.rank = e.number(t.rankVar, 0, t.size-1)
	t.local = e.number("SLURM_LOCALID", 0, t.size-1)
	t.node = e.number("SLURM_NODEID", 0, t.nodes-1)
	if err := e.readLists(t); err != nil {
		e.fail("%w. %s", err, srunHint)
		return nil
	}
	t.locals = t.counts[t.node]
	t.even = slices.Max(t.counts) == slices.Min(t.counts)
	t.whole = t.size == t.nodes
	reserved, _ := strconv.Atoi(firstNumber.FindString(e.text("SLURM_STEP_RESV_PORTS"))) // as in [12000-12003,12010]
	if reserved > 0 && reserved <= maxPort {
		t.port = reserved
	}
	return t
}

// readLists reads the nodes and their tasks, and checks all numbers against them.
func (e *env) readLists(t *task) (err error) {
	const ofHosts, ofCounts = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
	if t.hosts, err = Hosts(e.text(ofHosts)); err != nil {
		return fmt.Errorf("%s: %w", ofHosts, err)
	}
	if t.counts, err = Counts(e.text(ofCounts)); err != nil {
		return fmt.Errorf("%s: %w", ofCounts, err)
	}
	sum := 0
	for _, n := range t.counts {
		sum += n
	}
	nodes := set("SLURM_STEP_NUM_NODES", t.nodes)
	switch {
	case len(t.hosts) != t.nodes:
		return fmt.Errorf("%s names %d nodes, but %s", e.show(ofHosts), len(t.hosts), nodes)
	case len(t.counts) != t.nodes || sum != t.size:
		return fmt.Errorf("%s means %d tasks on %d nodes, but %s, %s", e.show(ofCounts), sum, len(t.counts),
			set(t.sizeVar, t.size), nodes)
	case slices.Min(t.counts) == 0:
		return fmt.Errorf("%s: a node has no task, so its devices would be idle; pass --ntasks-per-node, or "+
			"fewer nodes", e.show(ofCounts))
	case t.local >= t.counts[t.node]:
		return fmt.Errorf("%s, but %s gives node %d only %d tasks", set("SLURM_LOCALID", t.local), e.show(ofCounts),
			t.node, t.counts[t.node])
	case t.host != t.hosts[t.node]:
		return fmt.Errorf("%s, but %s has %s at %s: the variables belong to different steps",
			show("SLURMD_NODENAME", t.host), e.show(ofHosts), t.hosts[t.node], set("SLURM_NODEID", t.node))
	}
	return nil
}

// completeStep adds to a placement what only Slurm gives.
func (e *env) completeStep(t *task, want request, p *Placement) {
	p.Job, p.Node, p.Hosts = t.job, t.host, t.hosts
	// The ranks of a node are consecutive, whatever the distribution of Slurm's own ranks: the first host then has
	// rank 0, and neighbours in a ring share a node.
	p.Rank = t.local
	for _, n := range t.counts[:t.node] {
		p.Rank += n
	}
	if p.Rank != t.rank {
		p.note("Slurm's task %d has rank %d here, since cprun numbers the ranks of a node consecutively: pass "+
			"--distribution=block to srun for equal numbers", t.rank, p.Rank)
	}
	if visible := e.text("CUDA_VISIBLE_DEVICES"); t.locals > 1 && visible != "" && !strings.Contains(visible, ",") {
		p.note("each task sees only one GPU (%s), so GPUs of a node may exchange through the host's memory: "+
			"pass --gpu-bind=none to srun, or start one task per node", show("CUDA_VISIBLE_DEVICES", visible))
	}
	p.Rendezvous = join(t.hosts[0], t.port)
	switch addr, from := e.meet(want, "MASTER_ADDR"); {
	case want.Rendezvous == "" && t.nodes == 1:
		p.Rendezvous = join("127.0.0.1", t.port)
	case want.Rendezvous == "" && loopback(addr):
		p.note("ignored %s, which is local to each of the %d nodes: they meet at %s", from, t.nodes, t.hosts[0])
	case addr != "":
		p.Rendezvous = addr
	}
}

// annotate adds Slurm's information about the job to a placement, whichever launcher started this process.
func (a allocation) annotate(p *Placement) {
	if a.job == "" {
		return
	}
	p.SlurmJob = a.control
	if a.node != "" {
		p.Node = a.node
	}
	if p.Several() {
		return
	}
	p.Job = a.label
	switch {
	case a.nodes > 1:
		p.note("Slurm's job %s has %d nodes, but this run uses one. To train on all, start it with srun: srun "+
			"--ntasks-per-node=1 cprun ...", a.job, a.nodes)
	case !a.onNode:
		p.note("this shell of Slurm's job %s may not run on the job's node (SLURMD_NODENAME is not set): start the "+
			"run with srun", a.job)
	}
}
