package place

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
)

// A launcher starts each process itself. The fields name its variables.
type launcher struct {
	source, name                                 string
	rankVar, sizeVar, localRankVar, localSizeVar string
	needs                                        string   // required as well; "": the rank suffices
	id                                           []string // variables with the name of the job
	perNode                                      bool     // a single task on a node gets all its devices
	bySlurm                                      bool     // srun, or a script under it, may set these as well
}

// The variables of torchrun's workers.
const (
	envRank           = "RANK"
	envWorldSize      = "WORLD_SIZE"
	envLocalRank      = "LOCAL_RANK"
	envLocalWorldSize = "LOCAL_WORLD_SIZE"
	envGroupRank      = "GROUP_RANK"
	envElasticRun     = "TORCHELASTIC_RUN_ID"
	envElasticCount   = "TORCHELASTIC_RESTART_COUNT"
	envElasticStore   = "TORCHELASTIC_USE_AGENT_STORE"
)

// envPMIxRank is set by PMIx launchers other than MPI's.
const envPMIxRank = "PMIX_RANK"

// launchers lists the launchers, the innermost first: torchrun may run under mpirun, never the reverse.
func launchers() []launcher {
	return []launcher{
		{
			source: Torchrun, name: "torchrun", rankVar: envRank, sizeVar: envWorldSize, localRankVar: envLocalRank,
			localSizeVar: envLocalWorldSize,
			needs:        envLocalRank, id: []string{envElasticRun}, bySlurm: true,
		},
		{
			source: OpenMPI, name: "mpirun of Open MPI", rankVar: "OMPI_COMM_WORLD_RANK",
			sizeVar: "OMPI_COMM_WORLD_SIZE", localRankVar: "OMPI_COMM_WORLD_LOCAL_RANK",
			localSizeVar: "OMPI_COMM_WORLD_LOCAL_SIZE",
			id:           []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}, perNode: true,
		},
		{
			source: MVAPICH, name: "mpirun of MVAPICH", rankVar: "MV2_COMM_WORLD_RANK", sizeVar: "MV2_COMM_WORLD_SIZE",
			localRankVar: "MV2_COMM_WORLD_LOCAL_RANK", localSizeVar: "MV2_COMM_WORLD_LOCAL_SIZE", perNode: true,
		},
		{
			source: PMI, name: "mpiexec of MPICH or Intel MPI", rankVar: "PMI_RANK", sizeVar: "PMI_SIZE",
			localRankVar: "MPI_LOCALRANKID", localSizeVar: "MPI_LOCALNRANKS", perNode: true, bySlurm: true,
		},
	}
}

// A task is one of several processes started by a launcher.
type task struct {
	launcher
	rank, size           int // its rank, and the number of tasks
	localRank, localSize int
}

// tasks finds the launcher of this process; nil: none started several.
func (e env) tasks() (*task, error) {
	for _, l := range launchers() {
		if !e.has(l.rankVar, l.sizeVar) || l.needs != "" && !e.has(l.needs) {
			continue
		}
		n := numbers{env: e}
		t := &task{launcher: l, size: n.get(l.sizeVar, 1, maxTasks)}
		t.rank = n.get(l.rankVar, 0, max(t.size-1, 0))
		if n.err != nil {
			return nil, n.err
		}
		if t.size > 1 {
			return t, nil
		}
	}
	return nil, nil
}

// lostPMIx refuses a task without a known number of tasks.
func (e env) lostPMIx() error {
	if !e.has(envPMIxRank) {
		return nil
	}
	for _, l := range launchers() {
		if e.has(l.sizeVar) {
			return nil
		}
	}
	return fmt.Errorf("%s: a PMIx launcher started this task without the number of tasks. "+
		"Use mpirun or srun, or pass --nnodes, --node-rank and --rendezvous; for a separate run, env -u %s cprun",
		show(envPMIxRank, e.text(envPMIxRank)), envPMIxRank)
}

// innermost decides between a launcher's variables and the Slurm step around them; nil: the step. srun itself sets
// PMI's variables, and scripts set torchrun's from Slurm's.
func innermost(e env, t *task, s *step) (*task, error) {
	if !t.bySlurm || s.tasks < 2 || t.size != s.tasks || e.has(envElasticRun) {
		return t, nil
	}
	if t.rank == s.rank {
		return nil, nil
	}
	return nil, fmt.Errorf("%s and %s, of %d tasks both: %s was exported before srun, or belongs to another launcher. "+
		"Unset it (env -u %s): cprun reads Slurm's own",
		set(t.rankVar, t.rank), set(envProcID, s.rank), s.tasks, t.rankVar, t.rankVar)
}

func (t *task) place(e env, want request) (Placement, error) {
	n := numbers{env: e}
	t.localSize = n.get(t.localSizeVar, 1, t.size)
	t.localRank = n.get(t.localRankVar, 0, max(t.localSize-1, 0))
	group := t.node()
	if t.source == Torchrun && e.has(envGroupRank) {
		group = n.get(envGroupRank, 0, t.size-1)
	}
	if n.err != nil {
		return Placement{}, n.err
	}
	p := Placement{Source: t.source, Rank: t.rank, LocalRank: t.localRank, LocalAgents: t.localSize, MaxAgents: t.size,
		NodeRank: group, Node: want.Hostname, Workers: 1}
	if t.perNode && t.localSize == 1 {
		p.Workers = 0
	}
	if t.source == Torchrun {
		p.Restart = e.optional(envElasticCount)
	}
	st := taskCounts{by: t.name, tasks: t.size, evidence: set(t.sizeVar, t.size), node: p.NodeRank, local: t.localSize}
	if t.size%t.localSize == 0 {
		st.nodes, st.even = t.size/t.localSize, true
	}
	var err error
	if p.MinAgents, err = st.checkFlags(want); err != nil {
		return Placement{}, err
	}
	id, err := t.job(e)
	if err != nil {
		return Placement{}, err
	}
	if p.Rendezvous, err = t.rendezvous(e, want, id); err != nil {
		return Placement{}, err
	}
	p.Job = t.source + ":" + cmp.Or(id, p.Rendezvous)
	return p, nil
}

// node returns the rank of this node; -1: unknown from the tasks.
func (t *task) node() int {
	switch {
	case t.localSize == 0 || t.oneHost():
		return 0
	case t.size%t.localSize == 0 && t.rank%t.localSize == t.localRank:
		return t.rank / t.localSize // ranks of a node are consecutive, as by default
	}
	return -1
}

// job returns the launcher's name of its job, or "".
func (t *task) job(e env) (string, error) {
	name, _ := e.first(t.id...)
	if name == "" {
		return "", nil
	}
	return e.word(name)
}

func (t *task) oneHost() bool { return t.localSize == t.size }

// rendezvous returns the address at which the tasks meet.
func (t *task) rendezvous(e env, want request, id string) (string, error) {
	addr, from, err := e.master(envMasterAddr)
	switch {
	case want.Rendezvous != "":
		addr, from = want.Rendezvous, "--rendezvous "+want.Rendezvous
	case err != nil:
		return "", err
	case addr != "" && t.source == Torchrun && e.text(envElasticStore) == "True":
		// torchrun itself listens at that port.
		host, _, _ := net.SplitHostPort(addr)
		addr = join(host, namedPort(addr+" "+id))
	case addr == "" && t.oneHost() && id != "":
		addr = join("127.0.0.1", namedPort(t.source+" "+id))
	case addr == "":
		return "", t.noRendezvous()
	}
	if !t.oneHost() && loopback(addr) {
		return "", fmt.Errorf("%s is local to each host, so %d tasks on several hosts (%s, %s) cannot meet "+
			"there. Pass the host of rank 0",
			from, t.size, set(t.sizeVar, t.size), set(t.localSizeVar, t.localSize))
	}
	return addr, nil
}

// noRendezvous returns the error of tasks without a rendezvous.
func (t *task) noRendezvous() error {
	host := "HOST:PORT with the host of rank 0"
	if t.oneHost() {
		host = join("127.0.0.1", rendezvousPort)
	}
	return fmt.Errorf("this is task %d of %d started by %s (%s, %s), and nothing says where they meet. Pass "+
		"--rendezvous %s, or set %s and %s. "+
		"For independent runs, unset the variable: env -u %s cprun",
		t.rank, t.size, t.name, set(t.rankVar, t.rank), set(t.sizeVar, t.size), host, envMasterAddr, envMasterPort,
		t.rankVar)
}

// The variables of a whole node. PET_ is the prefix of torchrun's own flags, which the operators of Kubernetes set.
// Scripts use the others with the same meaning.
const (
	envNodes         = "NNODES"
	envNodeRank      = "NODE_RANK"
	envPetNodes      = "PET_NNODES"
	envPetNodeRank   = "PET_NODE_RANK"
	envPetProcesses  = "PET_NPROC_PER_NODE"
	envJobCompletion = "JOB_COMPLETION_INDEX"
	envKubernetes    = "KUBERNETES_SERVICE_HOST"
)

// wholeNode returns the placement of an agent that is alone on its node, from variables and flags.
func (e env) wholeNode(want request) (Placement, error) {
	asked, err := e.requestedNodes(want)
	if err != nil {
		return Placement{}, err
	}
	if asked.most == 1 {
		return e.oneNode(want)
	}
	p := Placement{
		Source: asked.source, MinAgents: asked.least, MaxAgents: asked.most, LocalAgents: 1, Node: want.Hostname,
	}
	if p.Rank, err = e.nodeRank(want, asked); err != nil {
		return Placement{}, err
	}
	p.NodeRank = p.Rank
	if p.Workers, err = e.processes(want); err != nil {
		return Placement{}, err
	}
	if p.Rendezvous, err = e.rendezvous(want, asked, p.Rank < 0); err != nil {
		return Placement{}, err
	}
	p.Job = p.Source + ":" + p.Rendezvous
	return p, nil
}

// oneNode returns the placement of a process that is the whole job, unless a flag or variable contradicts.
func (e env) oneNode(want request) (Placement, error) {
	if want.NodeRank > 0 {
		return Placement{}, fmt.Errorf("--node-rank %d: there is one node; also pass --nnodes N with the number of "+
			"nodes", want.NodeRank)
	}
	p := Placement{Source: Alone, MinAgents: 1, MaxAgents: 1, LocalAgents: 1, Node: want.Hostname}
	if index := e.text(envJobCompletion); index != "" && want.Nodes == "" {
		p.note("%s, and nothing says how many pods train together: this pod trains alone. To train on all, pass "+
			"--nnodes N and --rendezvous HOST:PORT", show(envJobCompletion, index))
	}
	return p, nil
}

// rendezvous returns the address at which the nodes meet. Nodes without a rank need a rendezvous that assigns ranks,
// which need not be at rank 0.
func (e env) rendezvous(want request, asked nodeRequest, unranked bool) (string, error) {
	if want.Rendezvous != "" {
		return want.Rendezvous, nil
	}
	addr, from, err := e.master(envPetRendezvous, envPetMasterAddr, envMasterAddr)
	switch {
	case err != nil:
		return "", err
	case addr == "":
		return "", fmt.Errorf("%s: nothing says where the nodes meet. Pass --rendezvous HOST:PORT with the host of "+
			"rank 0, or set %s and %s",
			asked.evidence, envMasterAddr, envMasterPort)
	case unranked && !e.has(envPetRendezvous):
		return "", fmt.Errorf("%s, %s: nothing says which node this is. Pass --node-rank R, or set %s", asked.evidence,
			from, envNodeRank)
	}
	return addr, nil
}

// A nodeRequest is the requested number of nodes, and its source.
type nodeRequest struct {
	source, evidence string
	least, most      int
	rank             string // the variable with the node rank; "": any
}

// requestedNodes returns the number of nodes from the flag, or from the first variable with one.
func (e env) requestedNodes(want request) (nodeRequest, error) {
	if want.Nodes != "" {
		return nodeRequest{source: ByFlags, evidence: "--nnodes " + want.Nodes, least: want.least, most: want.most}, nil
	}
	for _, name := range []string{envPetNodes, envNodes} {
		text := e.text(name)
		if text == "" {
			continue
		}
		least, most, err := nodeRange(text)
		if err != nil {
			return nodeRequest{}, fmt.Errorf("%s: %w; correct it, or unset it", show(name, text), err)
		}
		return nodeRequest{source: e.operator(), evidence: show(name, text), least: least, most: most}, nil
	}
	if !e.has(envRank, envWorldSize) {
		return nodeRequest{least: 1, most: 1}, e.lostPMIx()
	}
	return e.pods()
}

func (e env) operator() string {
	if e.has(envKubernetes) || e.has(envJobCompletion) {
		return Kubernetes
	}
	return Torchrun
}

// pods reads RANK and WORLD_SIZE without LOCAL_RANK: an operator started one process per node. It counts nodes, or the
// processes of torchrun.
func (e env) pods() (nodeRequest, error) {
	size, err := e.number(envWorldSize, 1, maxTasks)
	if err != nil {
		return nodeRequest{}, err
	}
	says := set(envWorldSize, size)
	if per, err := strconv.Atoi(e.text(envPetProcesses)); err == nil && per > 1 {
		if size%per != 0 {
			return nodeRequest{}, fmt.Errorf("%s is not a multiple of %s; correct them, or unset them", says,
				set(envPetProcesses, per))
		}
		says += ", " + set(envPetProcesses, per)
		size /= per
	}
	if size > maxNodes {
		return nodeRequest{}, fmt.Errorf("%s: at most %d nodes", says, maxNodes)
	}
	return nodeRequest{source: e.operator(), evidence: says, least: size, most: size, rank: envRank}, nil
}

// nodeRank returns the rank of this node; -1: assigned at the rendezvous.
func (e env) nodeRank(want request, asked nodeRequest) (int, error) {
	if want.NodeRank >= 0 {
		if want.NodeRank >= asked.most {
			return 0, fmt.Errorf("--node-rank %d with %s: ranks go from 0 to %d", want.NodeRank, asked.evidence,
				asked.most-1)
		}
		return want.NodeRank, nil
	}
	names := []string{envPetNodeRank, envNodeRank, envJobCompletion}
	if asked.rank != "" {
		names = []string{asked.rank}
	}
	name, _ := e.first(names...)
	if name == "" {
		return -1, nil
	}
	rank, err := e.number(name, 0, asked.most-1)
	if err != nil {
		return 0, fmt.Errorf("%w (%s)", err, asked.evidence)
	}
	return rank, nil
}

// processes returns the number of processes per node that an operator requests. --nproc overrides it; for auto, gpu and
// cpu, cprun decides.
func (e env) processes(want request) (int, error) {
	text := e.text(envPetProcesses)
	if want.NProc > 0 || text == "" || text == "auto" || text == "gpu" || text == "cpu" {
		return 0, nil
	}
	return e.number(envPetProcesses, 1, maxTasks)
}
