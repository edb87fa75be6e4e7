package place

import (
	"slices"
)

// A nodeRequest is the requested number of nodes, and its source.
type nodeRequest struct {
	source, evidence string
	least, most      int
	rank             []string // variables with this node's rank
}

// placeNode returns the placement of an agent that is alone on its node, from variables and flags. PET_ is the prefix
// of torchrun's own flags, which the operators of Kubernetes set. Scripts use others with the same meaning.
func (e *env) placeNode(want request) Placement {
	asked := e.requestedNodes(want)
	p := Placement{Source: Alone, MinAgents: 1, MaxAgents: 1, LocalAgents: 1, Node: want.Hostname}
	if asked.most <= 1 {
		if want.NodeRank > 0 {
			e.fail("--node-rank %d: there is one node; also pass --nnodes N with the number of nodes", want.NodeRank)
		}
		if want.Nodes == "" {
			e.refuseHalf()
			e.refuseNode(want, asked)
		}
		if e.has("JOB_COMPLETION_INDEX") && want.Nodes == "" {
			p.note("%s, and nothing says how many pods train together: this pod trains alone. To train on all, pass "+
				"--nnodes N and --rendezvous HOST:PORT", e.show("JOB_COMPLETION_INDEX"))
		}
		p.Workers = e.processes(want)
		return p
	}
	p.Source, p.MinAgents, p.MaxAgents = asked.source, asked.least, asked.most
	p.Rank = e.nodeRank(want, asked)
	p.Workers = e.processes(want)
	addr, from := e.meet(want, "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR", "MASTER_ADDR")
	switch {
	case addr == "":
		e.fail("%s: nothing says where the nodes meet. Pass --rendezvous HOST:PORT with the host of rank 0, or set "+
			"MASTER_ADDR and MASTER_PORT", asked.evidence)
	case p.Rank < 0 && want.Rendezvous == "" && !e.has("PET_RDZV_ENDPOINT"): // which would assign ranks
		e.fail("%s, %s: nothing says which node this is. Pass --node-rank R, or set NODE_RANK", asked.evidence, from)
	}
	p.Rendezvous = addr
	p.Job = p.Source + ":" + addr
	return p
}

// refuseNode refuses what says that there are several nodes where nothing says how many: each would train alone.
func (e *env) refuseNode(want request, asked nodeRequest) {
	for _, name := range []string{"PET_NODE_RANK", "NODE_RANK"} {
		if e.optional(name) > 0 {
			e.fail("%s: there is one node; pass --nnodes N with the number of nodes, or --nnodes 1 to train alone",
				e.show(name))
		}
	}
	if want.Rendezvous != "" && asked.least == 0 {
		e.fail("--rendezvous %s: nothing says how many nodes meet; also pass --nnodes N with their number", want.Rendezvous)
	}
}

// requestedNodes returns the number of nodes from the flag, or from the first variable with one. RANK and WORLD_SIZE
// without LOCAL_RANK mean that an operator started one process per node.
func (e *env) requestedNodes(want request) nodeRequest {
	r := nodeRequest{source: ByFlags, evidence: "--nnodes " + want.Nodes, least: want.least, most: want.most,
		rank: []string{"PET_NODE_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX"}}
	if want.Nodes != "" {
		return r
	}
	r.source = Torchrun
	if e.has("KUBERNETES_SERVICE_HOST") || e.has("JOB_COMPLETION_INDEX") {
		r.source = Kubernetes
	}
	switch name, text := e.first("PET_NNODES", "NNODES"); {
	case name != "":
		var err error
		r.evidence = show(name, text)
		if r.least, r.most, err = nodeRange(text); err != nil {
			e.fail("%s: %w; correct it, or unset it", r.evidence, err)
		}
	case e.has("RANK", "WORLD_SIZE"):
		r.rank = []string{"RANK"}
		r.most, r.evidence = e.pods()
		r.least = r.most
	default:
		e.lostPMIx()
	}
	return r
}

// pods returns WORLD_SIZE as a number of nodes. It counts nodes, or the processes of torchrun.
func (e *env) pods() (size int, evidence string) {
	size = e.number("WORLD_SIZE", 1, maxTasks)
	evidence = set("WORLD_SIZE", size)
	if per := e.optional("PET_NPROC_PER_NODE"); per > 1 {
		processes := set("PET_NPROC_PER_NODE", per)
		if size%per != 0 {
			e.fail("%s is not a multiple of %s; correct them, or unset them", evidence, processes)
		}
		evidence += ", " + processes
		size /= per
	}
	if size > maxNodes {
		e.fail("%s: at most %d nodes", evidence, maxNodes)
	}
	return size, evidence
}

// lostPMIx refuses a task without a known number of tasks: PMIx launchers other than MPI's set only its rank.
func (e *env) lostPMIx() {
	if !e.has("PMIX_RANK") {
		return
	}
	for _, l := range launchers() {
		if e.has(l.sizeVar) {
			return
		}
	}
	e.fail("%s: a PMIx launcher started this task without the number of tasks. Use mpirun or srun, or pass --nnodes, "+
		"--node-rank and --rendezvous; for a separate run, env -u PMIX_RANK cprun", e.show("PMIX_RANK"))
}

// nodeRank returns the rank of this node; -1: assigned at the rendezvous.
func (e *env) nodeRank(want request, asked nodeRequest) int {
	if want.NodeRank >= asked.most {
		e.fail("--node-rank %d with %s: ranks go from 0 to %d", want.NodeRank, asked.evidence, asked.most-1)
	}
	name, _ := e.first(asked.rank...)
	if want.NodeRank >= 0 || name == "" {
		return want.NodeRank
	}
	one := env{get: e.get}
	rank := one.number(name, 0, asked.most-1)
	if one.err != nil {
		e.fail("%w (%s)", one.err, asked.evidence)
	}
	return rank
}

// processes returns the number of processes per node that an operator requests. --nproc overrides it; for auto, gpu and
// cpu, cprun decides.
func (e *env) processes(want request) int {
	text := e.text("PET_NPROC_PER_NODE")
	if want.NProc > 0 || slices.Contains([]string{"", "auto", "gpu", "cpu"}, text) {
		return 0
	}
	return e.number("PET_NPROC_PER_NODE", 1, maxTasks)
}
