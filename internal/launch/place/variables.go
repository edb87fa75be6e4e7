package place

import (
	"fmt"
	"strconv"
)

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
func (e env) wholeNode(want request) (Place, error) {
	asked, err := e.asked(want)
	if err != nil {
		return Place{}, err
	}
	if asked.most == 1 {
		return e.oneNode(want)
	}
	p := Place{Source: asked.source, MinAgents: asked.least, MaxAgents: asked.most, LocalAgents: 1, Node: want.host}
	if p.Rank, err = e.nodeRank(want, asked); err != nil {
		return Place{}, err
	}
	p.NodeRank = p.Rank
	if p.Workers, err = e.processes(want); err != nil {
		return Place{}, err
	}
	if p.Rendezvous, err = e.meet(want, asked, p.Rank < 0); err != nil {
		return Place{}, err
	}
	p.Job = p.Source + ":" + p.Rendezvous
	return p, nil
}

// oneNode returns the place of a process that is the whole job, unless something says that it is not.
func (e env) oneNode(want request) (Place, error) {
	if want.nodeRank > 0 {
		return Place{}, fmt.Errorf("--node-rank %d: there is one node; pass --nnodes N, too, with the number of nodes",
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
func (e env) meet(want request, asked nodesAsked, unranked bool) (string, error) {
	if want.meet != "" {
		return want.meet, nil
	}
	addr, from, err := e.master(envPetRendezvous, envPetMasterAddr, envMasterAddr)
	switch {
	case err != nil:
		return "", err
	case addr == "":
		return "", fmt.Errorf("%s: nothing says where the nodes meet. Pass --rendezvous HOST:PORT with the host of "+
			"rank 0, or set %s and %s",
			asked.says, envMasterAddr, envMasterPort)
	case unranked && !e.has(envPetRendezvous):
		return "", fmt.Errorf("%s, %s: nothing says which node this is. Pass --node-rank R, or set %s", asked.says,
			from, envNodeRank)
	}
	return addr, nil
}

// A nodesAsked is the requested number of nodes, and its source.
type nodesAsked struct {
	source, says string
	least, most  int
	rank         string // the variable with the rank that belongs to it, "" for any
}

// asked reads the number of nodes: that of the flag, or of the first variables that give one.
func (e env) asked(want request) (nodesAsked, error) {
	if want.nodes != "" {
		return nodesAsked{source: ByFlags, says: "--nnodes " + want.nodes, least: want.least, most: want.most}, nil
	}
	for _, name := range []string{envPetNodes, envNodes} {
		text := e.text(name)
		if text == "" {
			continue
		}
		least, most, err := nodeRange(text)
		if err != nil {
			return nodesAsked{}, fmt.Errorf("%s: %w; set it right, or unset it", show(name, text), err)
		}
		return nodesAsked{source: e.operator(), says: show(name, text), least: least, most: most}, nil
	}
	if !e.has(envRank, envWorldSize) {
		return nodesAsked{least: 1, most: 1}, e.lostPMIx()
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
func (e env) pods() (nodesAsked, error) {
	size, err := e.number(envWorldSize, 1, maxTasks)
	if err != nil {
		return nodesAsked{}, err
	}
	says := set(envWorldSize, size)
	if per, err := strconv.Atoi(e.text(envPetProcesses)); err == nil && per > 1 {
		if size%per != 0 {
			return nodesAsked{}, fmt.Errorf("%s is no multiple of %s; set them right, or unset them", says,
				set(envPetProcesses, per))
		}
		says += ", " + set(envPetProcesses, per)
		size /= per
	}
	if size > maxNodes {
		return nodesAsked{}, fmt.Errorf("%s: at most %d nodes", says, maxNodes)
	}
	return nodesAsked{source: e.operator(), says: says, least: size, most: size, rank: envRank}, nil
}

// nodeRank reads which node this is; -1: it will be told where they meet.
func (e env) nodeRank(want request, asked nodesAsked) (int, error) {
	if want.nodeRank >= 0 {
		if want.nodeRank >= asked.most {
			return 0, fmt.Errorf("--node-rank %d with %s: ranks go from 0 to %d", want.nodeRank, asked.says,
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
		return 0, fmt.Errorf("%w (%s)", err, asked.says)
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
