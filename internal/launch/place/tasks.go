package place

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
)

// A launcher is one that starts each process by itself, and the variables in which it tells them.
type launcher struct {
	source, name                                 string
	rankVar, sizeVar, localRankVar, localSizeVar string
	needs                                        string   // it started this only if this is set as well; "": the rank suffices
	id                                           []string // variables that name the job
	perNode                                      bool     // a task that is alone on its node has all devices of it
	bySlurm                                      bool     // srun, or a script that it runs, sets these as well
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

// envPMIxRank comes from a launcher of PMIx other than MPI's.
const envPMIxRank = "PMIX_RANK"

// launchers lists them, the innermost first: torchrun may run under mpirun, and not the other way round.
func launchers() []launcher {
	return []launcher{
		{
			source: Torchrun, name: "torchrun", rankVar: envRank, sizeVar: envWorldSize, localRankVar: envLocalRank,
			localSizeVar: envLocalWorldSize,
			needs:        envLocalRank, id: []string{envElasticRun}, bySlurm: true,
		},
		{
			source: OpenMPI, name: "mpirun of Open MPI", rankVar: "OMPI_COMM_WORLD_RANK", sizeVar: "OMPI_COMM_WORLD_SIZE",
			localRankVar: "OMPI_COMM_WORLD_LOCAL_RANK", localSizeVar: "OMPI_COMM_WORLD_LOCAL_SIZE",
			id: []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}, perNode: true,
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

// A task is one of several processes that a launcher has started.
type task struct {
	launcher
	rank, size           int // its rank, and the number of tasks
	localRank, localSize int
}

// tasks finds the launcher of this process; nil: none has started several.
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

// lostPMIx refuses a task of which nothing says how many there are.
func (e env) lostPMIx() error {
	if !e.has(envPMIxRank) {
		return nil
	}
	for _, l := range launchers() {
		if e.has(l.sizeVar) {
			return nil
		}
	}
	return fmt.Errorf("%s: a launcher of PMIx has started this as one of its tasks, and does not say how many there "+
		"are. "+
		"Use mpirun or srun, or pass --nnodes, --node-rank and --rendezvous; for a run by itself, env -u %s cprun",
		show(envPMIxRank, e.text(envPMIxRank)), envPMIxRank)
}

// innermost decides between a launcher's variables and the Slurm step around them: nil stands for the
// step. srun itself sets those of PMI, and scripts set torchrun's from Slurm's.
func innermost(e env, t *task, s *step) (*task, error) {
	if !t.bySlurm || s.tasks < 2 || t.size != s.tasks || e.has(envElasticRun) {
		return t, nil
	}
	if t.rank == s.rank {
		return nil, nil
	}
	return nil, fmt.Errorf("%s and %s, of %d tasks both: %s was exported before srun, or is another launcher's. Take "+
		"it away (env -u %s), since cprun reads Slurm's own",
		set(t.rankVar, t.rank), set(envProcID, s.rank), s.tasks, t.rankVar, t.rankVar)
}

// place returns a task's place.
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
		NodeRank: group, Node: want.host, Workers: 1}
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

// node returns the rank of this node; -1: the tasks do not show it.
func (t *task) node() int {
	switch {
	case t.localSize == 0 || t.oneHost():
		return 0
	case t.size%t.localSize == 0 && t.rank%t.localSize == t.localRank:
		return t.rank / t.localSize // ranks that follow each other on a node, as they do by default
	}
	return -1
}

// job returns the launcher's name for its job, if it has one.
func (t *task) job(e env) (string, error) {
	name, _ := e.first(t.id...)
	if name == "" {
		return "", nil
	}
	return e.word(name)
}

func (t *task) oneHost() bool { return t.localSize == t.size }

// meet returns where the tasks meet.
func (t *task) rendezvous(e env, want request, id string) (string, error) {
	addr, from, err := e.master(envMasterAddr)
	switch {
	case want.rendezvous != "":
		addr, from = want.rendezvous, "--rendezvous "+want.rendezvous
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
		return "", fmt.Errorf("%s leads every host to itself, and %d tasks on several hosts (%s, %s) cannot meet "+
			"there. Give the host of rank 0",
			from, t.size, set(t.sizeVar, t.size), set(t.localSizeVar, t.localSize))
	}
	return addr, nil
}

// nowhere returns the error where nothing says where tasks meet.
func (t *task) noRendezvous() error {
	host := "HOST:PORT with the host of rank 0"
	if t.oneHost() {
		host = join("127.0.0.1", rendezvousPort)
	}
	return fmt.Errorf("this is task %d of %d that %s has started (%s, %s), and nothing says where they meet. Pass "+
		"--rendezvous %s, or set %s and %s. "+
		"For runs that have nothing to do with each other, take the variables away: env -u %s cprun",
		t.rank, t.size, t.name, set(t.rankVar, t.rank), set(t.sizeVar, t.size), host, envMasterAddr, envMasterPort, t.rankVar)
}

// The variables of a whole node. PET_ begins torchrun's own flags, which the operators of Kubernetes set; scripts use
// the others with the same meaning.
const (
	envNodes         = "NNODES"
	envNodeRank      = "NODE_RANK"
	envPetNodes      = "PET_NNODES"
	envPetNodeRank   = "PET_NODE_RANK"
	envPetProcesses  = "PET_NPROC_PER_NODE"
	envJobCompletion = "JOB_COMPLETION_INDEX"
	envKubernetes    = "KUBERNETES_SERVICE_HOST"
)

// wholeNode returns the place of an agent that is alone on its node, from variables and flags.
func (e env) wholeNode(want request) (Placement, error) {
	asked, err := e.requestedNodes(want)
	if err != nil {
		return Placement{}, err
	}
	if asked.most == 1 {
		return e.oneNode(want)
	}
	p := Placement{Source: asked.source, MinAgents: asked.least, MaxAgents: asked.most, LocalAgents: 1, Node: want.host}
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

// oneNode returns the place of a process that is the whole job, unless something says that it is not.
func (e env) oneNode(want request) (Placement, error) {
	if want.nodeRank > 0 {
		return Placement{}, fmt.Errorf("--node-rank %d: there is one node; pass --nnodes N, too, with the number of nodes",
			want.nodeRank)
	}
	p := alone(want)
	if index := e.text(envJobCompletion); index != "" && want.nodes == "" {
		p.note("%s, and nothing says how many pods train together: this one trains by itself. To train on all, pass "+
			"--nnodes N and --rendezvous HOST:PORT", show(envJobCompletion, index))
	}
	return p, nil
}

// meet returns where nodes meet. Those that have no rank yet are given one at a rendezvous, which need not
// be the address of a node with rank 0.
func (e env) rendezvous(want request, asked nodeRequest, unranked bool) (string, error) {
	if want.rendezvous != "" {
		return want.rendezvous, nil
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

// A nodesAsked is the requested number of nodes, and its source.
type nodeRequest struct {
	source, evidence string
	least, most      int
	rank             string // the variable with the rank that belongs to it, "" for any
}

// asked reads the number of nodes: that of the flag, or of the first variables that give one.
func (e env) requestedNodes(want request) (nodeRequest, error) {
	if want.nodes != "" {
		return nodeRequest{source: ByFlags, evidence: "--nnodes " + want.nodes, least: want.least, most: want.most}, nil
	}
	for _, name := range []string{envPetNodes, envNodes} {
		text := e.text(name)
		if text == "" {
			continue
		}
		least, most, err := nodeRange(text)
		if err != nil {
			return nodeRequest{}, fmt.Errorf("%s: %w; set it right, or unset it", show(name, text), err)
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

// pods reads RANK and WORLD_SIZE without LOCAL_RANK: an operator has started one process on each node, and counts
// nodes, or the processes of torchrun.
func (e env) pods() (nodeRequest, error) {
	size, err := e.number(envWorldSize, 1, maxTasks)
	if err != nil {
		return nodeRequest{}, err
	}
	says := set(envWorldSize, size)
	if per, err := strconv.Atoi(e.text(envPetProcesses)); err == nil && per > 1 {
		if size%per != 0 {
			return nodeRequest{}, fmt.Errorf("%s is no multiple of %s; set them right, or unset them", says,
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

// nodeRank reads which node this is; -1: it will be told where they meet.
func (e env) nodeRank(want request, asked nodeRequest) (int, error) {
	if want.nodeRank >= 0 {
		if want.nodeRank >= asked.most {
			return 0, fmt.Errorf("--node-rank %d with %s: ranks go from 0 to %d", want.nodeRank, asked.evidence,
				asked.most-1)
		}
		return want.nodeRank, nil
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

// processes reads how many an operator wants on each node. --nproc beats it; auto, gpu and cpu are
// for cprun to decide as well.
func (e env) processes(want request) (int, error) {
	text := e.text(envPetProcesses)
	if want.nproc > 0 || text == "" || text == "auto" || text == "gpu" || text == "cpu" {
		return 0, nil
	}
	return e.number(envPetProcesses, 1, maxTasks)
}
