package place

import (
	"cmp"
	"net"
)

// A launcher starts each process itself. The fields name its variables.
type launcher struct {
	source, name                          string
	rankVar, sizeVar, localVar, localsVar string
	needs                                 string   // required as well; "": the rank suffices
	id                                    []string // variables with the name of the job
	perNode                               bool     // a single task on a node gets all its devices
	bySlurm                               bool     // srun, or a script under it, may set these as well
}

// launchers lists the launchers, the innermost first: torchrun may run under mpirun, never the reverse.
func launchers() []launcher {
	return []launcher{
		{
			source: Torchrun, name: "torchrun",
			rankVar: "RANK", sizeVar: "WORLD_SIZE", localVar: "LOCAL_RANK", localsVar: "LOCAL_WORLD_SIZE",
			needs: "LOCAL_RANK", id: []string{"TORCHELASTIC_RUN_ID"}, bySlurm: true,
		},
		{
			source: OpenMPI, name: "mpirun of Open MPI",
			rankVar: "OMPI_COMM_WORLD_RANK", sizeVar: "OMPI_COMM_WORLD_SIZE",
			localVar: "OMPI_COMM_WORLD_LOCAL_RANK", localsVar: "OMPI_COMM_WORLD_LOCAL_SIZE",
			id: []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}, perNode: true,
		},
		{
			source: MVAPICH, name: "mpirun of MVAPICH",
			rankVar: "MV2_COMM_WORLD_RANK", sizeVar: "MV2_COMM_WORLD_SIZE",
			localVar: "MV2_COMM_WORLD_LOCAL_RANK", localsVar: "MV2_COMM_WORLD_LOCAL_SIZE", perNode: true,
		},
		{
			source: PMI, name: "mpiexec of MPICH or Intel MPI",
			rankVar: "PMI_RANK", sizeVar: "PMI_SIZE", localVar: "MPI_LOCALRANKID", localsVar: "MPI_LOCALNRANKS",
			perNode: true, bySlurm: true,
		},
	}
}

// A task is one of several processes started by a launcher.
type task struct {
	launcher
	rank, size    int // its rank, and the number of tasks
	local, locals int // the same on this node
	node, nodes   int // rank of this node, -1: unknown; number of nodes, 0: unknown
	even          bool
	whole         bool   // this task gets all devices of its node
	job           string // the launcher's name of the job

	// Of Slurm.
	hosts  []string
	counts []int // tasks on each host
	host   string
	port   int
}

// started finds the launcher of this process; nil: none started several.
func (e *env) started() *task {
	for _, l := range launchers() {
		if !e.has(l.rankVar, l.sizeVar) || l.needs != "" && !e.has(l.needs) {
			continue
		}
		t := &task{launcher: l, size: e.number(l.sizeVar, 1, maxTasks)}
		if t.rank = e.number(l.rankVar, 0, t.size-1); t.size > 1 {
			return t
		}
	}
	return nil
}

// refuseHalf refuses a rank of several without their number, and the reverse: each copy would train alone.
func (e *env) refuseHalf() {
	for _, l := range launchers() {
		given, lacks := l.rankVar, l.sizeVar
		if !e.has(l.rankVar) {
			given, lacks = lacks, given
		}
		if n := e.optional(given); !e.has(lacks) && (n > 1 || n == 1 && given == l.rankVar) {
			e.fail("%s is set, and %s is not: this looks like one of several tasks that lost its environment. Set both, "+
				"or pass --nnodes; for a separate run, env -u %s cprun", e.show(given), lacks, given)
		}
	}
}

// innermost decides between a launcher's variables, if any, and the Slurm step around them. srun itself sets PMI's
// variables, and scripts set torchrun's from Slurm's.
func (e *env) innermost(t, step *task) *task {
	switch {
	case t == nil:
		return step
	case !t.bySlurm || t.size != step.size || e.has("TORCHELASTIC_RUN_ID"):
		return t
	case t.rank != step.rank:
		e.fail("%s and %s, of %d tasks both: %s was exported before srun, or belongs to another launcher. "+
			"Unset it (env -u %s): cprun reads Slurm's own",
			set(t.rankVar, t.rank), set(step.rankVar, step.rank), step.size, t.rankVar, t.rankVar)
	}
	return step
}

// placeTask returns the placement of one of several tasks.
func (e *env) placeTask(t *task, want request) Placement {
	if t.source != Slurm {
		e.localTask(t)
	}
	p := Placement{Source: t.source, Rank: t.rank, MinAgents: e.leastAgents(t, want), MaxAgents: t.size, Workers: 1,
		LocalRank: t.local, LocalAgents: t.locals, Node: want.Hostname}
	if t.whole {
		p.Workers = 0
	}
	if t.source == Slurm {
		e.completeStep(t, want, &p)
		return p
	}
	p.Rendezvous = e.taskRendezvous(t, want)
	p.Job = t.source + ":" + cmp.Or(t.job, p.Rendezvous)
	return p
}

// localTask reads the place of a task on its node. By default the ranks of a node are consecutive.
func (e *env) localTask(t *task) {
	t.locals = e.number(t.localsVar, 1, t.size)
	t.local = e.number(t.localVar, 0, t.locals-1)
	t.whole = t.perNode && t.locals == 1
	t.node = -1
	if t.size%t.locals == 0 {
		t.nodes, t.even = t.size/t.locals, true
	}
	switch {
	case t.source == Torchrun && e.has("GROUP_RANK"):
		t.node = e.number("GROUP_RANK", 0, t.size-1)
	case t.nodes == 1:
		t.node = 0
	case t.even && t.rank%t.locals == t.local:
		t.node = t.rank / t.locals
	}
	if name, _ := e.first(t.id...); name != "" {
		t.job = e.word(name)
	}
}

// taskRendezvous returns the address at which the tasks meet.
func (e *env) taskRendezvous(t *task, want request) string {
	addr, from := e.meet(want, "MASTER_ADDR")
	oneHost := t.nodes == 1
	switch {
	case want.Rendezvous == "" && addr != "" && t.source == Torchrun &&
		e.text("TORCHELASTIC_USE_AGENT_STORE") == "True": // torchrun itself listens at that port
		host, _, _ := net.SplitHostPort(addr)
		addr = join(host, namedPort(addr+" "+t.job))
	case addr == "" && oneHost && t.job != "":
		addr = join("127.0.0.1", namedPort(t.source+" "+t.job))
	case addr == "":
		host := "HOST:PORT with the host of rank 0"
		if oneHost {
			host = join("127.0.0.1", rendezvousPort)
		}
		e.fail("this is task %d of %d started by %s (%s, %s), and nothing says where they meet. Pass --rendezvous %s, "+
			"or set MASTER_ADDR and MASTER_PORT. For independent runs, unset the variable: env -u %s cprun",
			t.rank, t.size, t.name, set(t.rankVar, t.rank), set(t.sizeVar, t.size), host, t.rankVar)
	}
	if !oneHost && loopback(addr) {
		e.fail("%s is local to each host, so %d tasks on several hosts (%s, %s) cannot meet there. Pass the host of rank 0",
			from, t.size, set(t.sizeVar, t.size), set(t.localsVar, t.locals))
	}
	return addr
}
