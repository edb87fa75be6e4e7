package place

import "fmt"

// Sources of a Place: who has started the agents.
const (
	Alone      = "alone" // this process is the whole job
	Slurm      = "slurm"
	Torchrun   = "torchrun" // its workers, or NNODES and NODE_RANK as its users set them
	Kubernetes = "kubernetes"
	OpenMPI    = "openmpi"
	PMI        = "pmi" // MPICH, Intel MPI
	MVAPICH    = "mvapich"
	ByFlags    = "flags"
)

// Place is where an agent stands among those of its job.
type Place struct {
	// Source says who has started the agents, in one of the words above.
	Source string
	// Job names the job: the same text for all its agents, and another after Slurm has requeued it. It is
	// no secret.
	Job string
	// Restart is how often the launcher has started the job again.
	Restart int
	// SlurmJob is what `scontrol requeue` takes for the job; "" outside of Slurm. Where it is set, a second
	// SIGTERM is no order to end at once: Slurm sends two.
	SlurmJob string

	// Rank is this agent's among the agents; -1: it is to be given one where they meet. Rank 0 is at the
	// rendezvous, and makes the job's key where no file has it.
	Rank int
	// MinAgents and MaxAgents are how many agents the job may have. Where they are equal, it has that many.
	MinAgents, MaxAgents int
	// Workers is how many processes each agent has: 1 where each task is for one device, 0 where --nproc,
	// or the number of devices, says it. Each agent knows its own: MPI may put two tasks on one node and one
	// on another.
	Workers int
	// LocalRank is this agent's among the LocalAgents on this node. Where all devices of the node are
	// visible, it takes the one of that number.
	LocalRank, LocalAgents int

	// NodeRank is this node's among the nodes; -1: not known.
	NodeRank int
	// Node is the name of this node: Slurm's, or else that of the host.
	Node string
	// Hosts are the names of all nodes in the order of ranks, and Tasks the agents on each; nil where nobody
	// has told.
	Hosts []string
	Tasks []int

	// Rendezvous is the address host:port at which the agents meet, "" for one that is alone. The port after
	// it is used, too: KeyAddress.
	Rendezvous string
	// Notes are what the user should know, a line each.
	Notes []string
}

// Several reports whether there may be more agents than this one.
func (p *Place) Several() bool { return p.MaxAgents > 1 }

// note adds a line for the user.
func (p *Place) note(format string, args ...any) {
	p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
}

// Find tells where this process stands. It refuses with the fix what it does not understand, so that
// tasks of one job never train side by side by mistake.
//
// Several launchers may have left variables, since one starts another. The innermost counts: torchrun,
// then MPI, then Slurm, then variables for a whole node, then flags alone. What a launcher has started
// is a fact, so a flag that contradicts it is an error. What a variable asks for gives way to a flag.
func Find(getenv func(name string) string, flags Flags) (Place, error) {
	e := env{getenv}
	want, err := flags.parse()
	if err != nil {
		return Place{}, err
	}
	a, err := findAllocation(e)
	if err != nil {
		return Place{}, err
	}
	p, err := e.find(want, a.step)
	if err != nil {
		return Place{}, err
	}
	a.mark(&p)
	return p, nil
}

// find asks one launcher after the other.
func (e env) find(want request, s *step) (Place, error) {
	t, err := e.tasks()
	if err != nil {
		return Place{}, err
	}
	if t != nil && s != nil {
		if t, err = innermost(e, t, s); err != nil {
			return Place{}, err
		}
	}
	switch {
	case t != nil:
		return t.place(e, want)
	case s != nil && s.tasks > 1:
		return s.place(e, want)
	}
	return e.wholeNode(want)
}

// alone is the place of a process that is the whole job.
func alone(want request) Place {
	return Place{Source: Alone, MinAgents: 1, MaxAgents: 1, LocalAgents: 1, Node: want.host}
}
