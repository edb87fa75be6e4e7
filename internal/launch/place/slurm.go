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
	"this node, env -u " + envProcID + " cprun"

// specialSteps is the first id of batch shells, interactive shells and similar steps. The steps of srun have lower ids.
const specialSteps = 0xfffffff0

// A step is a call of srun, seen by one of its tasks.
type step struct {
	label, id           string // of the job and the step; of the step
	port                int
	tasks, nodes        int
	rank, local, nodeID int // of this task
	hosts               []string
	counts              []int // tasks on each node
	name                string
}

// findStep reads the variables of a task; nil: this process is not a task.
func findStep(e env, a allocation) (*step, error) {
	id, err := strconv.ParseUint(e.text(envStepID), 10, 32)
	if err != nil || id >= specialSteps {
		return nil, lostTask(e)
	}
	if !e.has(envProcID) {
		return nil, nil
	}
	n := numbers{env: e}
	s := &step{id: strconv.FormatUint(id, 10)}
	a.step = s
	s.label = a.label()
	job, _ := strconv.ParseUint(a.job, 10, 64)
	s.port = stepPort(job, id)
	s.tasks = n.get(envStepTasks, 1, maxTasks)
	if n.err != nil {
		return nil, n.err
	}
	if s.name, err = e.word(envNodeName); err != nil || s.tasks == 1 {
		return s, err
	}
	if size := e.optional(envHetSize); size > 1 {
		return nil, fmt.Errorf("%s: cprun does not support heterogeneous jobs. Submit the training nodes as "+
			"a job of one component", set(envHetSize, size))
	}
	s.nodes = n.get(envStepNodes, 1, maxNodes)
	s.rank = n.get(envProcID, 0, s.tasks-1)
	s.local = n.get(envLocalID, 0, s.tasks-1)
	s.nodeID = n.get(envNodeID, 0, max(s.nodes-1, 0))
	if n.err != nil {
		return nil, n.err
	}
	if err := s.readLists(e); err != nil {
		return nil, fmt.Errorf("%w. %s", err, srunHint)
	}
	return s, nil
}

// readLists reads the nodes and their tasks, and checks all numbers against them.
func (s *step) readLists(e env) error {
	hosts, counts := show(envStepHosts, e.text(envStepHosts)), show(envStepCounts, e.text(envStepCounts))
	var err error
	if s.hosts, err = Hosts(e.text(envStepHosts)); err != nil {
		return fmt.Errorf("%s: %w", envStepHosts, err)
	}
	if s.counts, err = Counts(e.text(envStepCounts)); err != nil {
		return fmt.Errorf("%s: %w", envStepCounts, err)
	}
	sum := 0
	for _, n := range s.counts {
		sum += n
	}
	switch {
	case len(s.hosts) != s.nodes:
		return fmt.Errorf("%s names %d nodes, but %s", hosts, len(s.hosts), set(envStepNodes, s.nodes))
	case len(s.counts) != s.nodes || sum != s.tasks:
		return fmt.Errorf("%s means %d tasks on %d nodes, but %s, %s", counts, sum, len(s.counts),
			set(envStepTasks, s.tasks), set(envStepNodes, s.nodes))
	case slices.Min(s.counts) == 0:
		return fmt.Errorf("%s: a node has no task, so its devices would be idle; pass --ntasks-per-node, or "+
			"fewer nodes", counts)
	case s.local >= s.counts[s.nodeID]:
		return fmt.Errorf("%s, but %s gives node %d only %d tasks", set(envLocalID, s.local), counts, s.nodeID,
			s.counts[s.nodeID])
	case s.name != s.hosts[s.nodeID]:
		return fmt.Errorf("%s, but %s has %s at %s: the variables belong to different steps", show(envNodeName, s.name),
			hosts, s.hosts[s.nodeID], set(envNodeID, s.nodeID))
	}
	return nil
}

// place returns the placement of one of several tasks.
func (s *step) place(e env, want request) (Placement, error) {
	here := s.counts[s.nodeID]
	least, err := taskCounts{
		by: "srun", tasks: s.tasks, evidence: set(envStepTasks, s.tasks), nodes: s.nodes, node: s.nodeID, local: here,
		even: slices.Max(s.counts) == slices.Min(s.counts),
	}.checkFlags(want)
	if err != nil {
		return Placement{}, err
	}
	p := Placement{
		Source: Slurm, Job: s.label, MinAgents: least, MaxAgents: s.tasks,
		LocalRank: s.local, LocalAgents: here, NodeRank: s.nodeID, Node: s.name, Hosts: s.hosts, Tasks: s.counts,
	}
	// The ranks of a node are consecutive, whatever the distribution of Slurm's own ranks: the first host then has
	// rank 0, and neighbours in a ring share a node.
	for _, n := range s.counts[:s.nodeID] {
		p.Rank += n
	}
	p.Rank += s.local
	if p.Rank != s.rank {
		p.note("Slurm's task %d has rank %d here, since cprun numbers the ranks of a node consecutively: pass "+
			"--distribution=block to srun for equal numbers", s.rank, p.Rank)
	}
	if s.tasks > s.nodes {
		p.Workers = 1
		gpuNotes(e, &p)
	}
	p.Rendezvous, err = s.rendezvous(e, want, &p)
	return p, err
}

// gpuNotes adds a note if tasks cannot access the memory of each other's GPUs.
func gpuNotes(e env, p *Placement) {
	visible := e.text(envVisible)
	if p.LocalAgents < 2 || visible == "" || strings.Contains(visible, ",") {
		return
	}
	why := show(envVisible, visible)
	if given := e.text(envGPUsPerTask); given != "" {
		why += ", " + show(envGPUsPerTask, given)
	}
	p.note("each task sees only one GPU (%s), so GPUs of a node may exchange through the host's memory: "+
		"pass --gpu-bind=none to srun, or start one task per node", why)
}

// rendezvous returns the address at which the agents of a step meet.
func (s *step) rendezvous(e env, want request, p *Placement) (string, error) {
	if want.Rendezvous != "" {
		return want.Rendezvous, nil
	}
	port := s.port
	if reserved := reservedPort(e.text(envStepPorts)); reserved > 0 {
		port = reserved
	}
	addr, from, err := e.master(envMasterAddr)
	switch {
	case err != nil:
		return "", err
	case s.nodes == 1:
		return join("127.0.0.1", port), nil
	case addr != "" && !loopback(addr):
		return addr, nil
	case addr != "":
		p.note("ignored %s, which is local to each of the %d nodes: they meet at %s", from, s.nodes, s.hosts[0])
	}
	return join(s.hosts[0], port), nil
}

// reservedPort returns the first port reserved by srun --resv-ports, such as [12000-12003,12010]; 0: none.
func reservedPort(text string) int {
	first := strings.FieldsFunc(text, func(c rune) bool { return c < '0' || c > '9' })
	if len(first) == 0 {
		return 0
	}
	port, err := strconv.Atoi(first[0])
	if err != nil || port > maxPort {
		return 0
	}
	return port
}

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

type allocation struct {
	job      string // its id, "" if there is no Slurm
	control  string // its name for scontrol
	nodes    int    // 0: unknown
	restarts int
	onNode   bool  // this process runs on one of its nodes, according to Slurm
	step     *step // of srun; nil: this process is not a task
}

// jobNumber matches scontrol's name of a job, jobID also that of an array task.
var (
	jobNumber = regexp.MustCompile(`^[0-9]{1,18}$`)
	jobID     = regexp.MustCompile(`^[0-9]{1,18}(_[0-9]{1,18})?$`)
)

func findAllocation(e env) (a allocation, err error) {
	id := e.text(envJobID)
	if id == "" {
		return a, lostTask(e)
	}
	if !jobNumber.MatchString(id) {
		return a, fmt.Errorf("%s: want Slurm's number of a job; unset it, or start this through Slurm",
			show(envJobID, id))
	}
	a = allocation{job: id, control: id, nodes: e.optional(envJobNodes), restarts: e.optional(envRestarts),
		onNode: e.has(envNodeName)}
	if array := e.text(envArrayJob) + "_" + e.text(envArrayTask); jobID.MatchString(array) {
		a.control = array
	}
	a.step, err = findStep(e, a)
	return a, err
}

// lostTask refuses a task of Slurm that lost a part of its environment: it would train separately. The shell of a batch
// job also has the variables of task 0, and is not refused.
func lostTask(e env) error {
	ofStep := e.optional(envStepTasks)
	shell := e.has(envJobID) && e.text(envProcID) == "0" && ofStep < 2
	if max(ofStep, e.optional(envTasks)) < 2 || !e.has(envProcID) || shell {
		return nil
	}
	missing := envJobID
	if e.has(missing) {
		missing = envStepID
	}
	tasks, _ := e.first(envStepTasks, envTasks)
	return fmt.Errorf("%s and %s are set, and %s is not that of a step: this looks like one of several tasks of "+
		"Slurm that lost its environment. %s",
		show(envProcID, e.text(envProcID)), show(tasks, e.text(tasks)), show(missing, e.text(missing)), srunHint)
}

// annotate adds Slurm's information about the job to a placement, whichever launcher started this process.
func (a allocation) annotate(p *Placement) {
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
		p.note("Slurm's job %s has %d nodes, but this run uses one. To train on all, start it with srun: srun "+
			"--ntasks-per-node=1 cprun ...", a.job, a.nodes)
	case !a.onNode:
		p.note("this shell of Slurm's job %s may not run on the job's node (%s is not set): start the run "+
			"with srun", a.job, envNodeName)
	}
}

// label names the job or step, and its restart.
func (a allocation) label() string {
	id := a.job
	if a.step != nil {
		id += "." + a.step.id
	}
	return fmt.Sprintf("%s:%s:%d", Slurm, id, a.restarts)
}
