// Package place finds where this process stands among the tasks that a launcher of several nodes has
// started: Slurm, torchrun, MPI, the operators of Kubernetes, or a person with flags.
//
// An agent is one process of cprun that a user or a launcher starts. With one task on a node it spawns
// a worker for each device; with one task for each device, each task is an agent with one worker. Find
// says which agent this is, how many there are, and at which address they meet. It reads nothing but
// its arguments, so every launcher is a table of variables in the tests.
package place

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Sources of a Place: the launcher of the agents.
const (
	Alone      = "alone" // this process is the whole job
	Slurm      = "slurm"
	Torchrun   = "torchrun" // its workers, or NNODES and NODE_RANK set by scripts
	Kubernetes = "kubernetes"
	OpenMPI    = "openmpi"
	PMI        = "pmi" // MPICH, Intel MPI
	MVAPICH    = "mvapich"
	ByFlags    = "flags"
)

// Place is the position of an agent among the agents of its job.
type Placement struct {
	// Source names the launcher of the agents, in one of the words above.
	Source string
	// Job names the job: the same text for all its agents, and another after Slurm has requeued it. It is public.
	Job string
	// Restart is how often the launcher has started the job again.
	Restart int
	// SlurmJob names the job for `scontrol requeue`; "" outside of Slurm. If it is set, a second SIGTERM is no order to
	// end at once: Slurm sends two.
	SlurmJob string

	// Rank is the rank of this agent; -1: the agents agree on one when they meet. Rank 0 is at the rendezvous.
	Rank int
	// MinAgents and MaxAgents bound the number of agents.
	MinAgents, MaxAgents int
	// Workers is the number of processes of this agent: 1 if each task is for one device, 0 if --nproc or the number of
	// devices decides. Agents may differ: MPI may put two tasks on one node and one on another.
	Workers int
	// LocalRank is the rank of this agent among the LocalAgents on this node. If all devices of the node are visible,
	// the agent takes the device of that number.
	LocalRank, LocalAgents int

	// NodeRank is the rank of this node; -1: not known.
	NodeRank int
	// Node is the name of this node: Slurm's, or else the host name.
	Node string
	// Hosts are the names of all nodes in the order of ranks, and Tasks the agents on each; nil: not known.
	Hosts []string
	Tasks []int

	// Rendezvous is the address host:port at which the agents meet; "": there is one agent.
	Rendezvous string
	// Notes are lines for the user.
	Notes []string
}

// Several reports whether there may be more agents than this one.
func (p *Placement) Several() bool { return p.MaxAgents > 1 }

func (p *Placement) note(format string, args ...any) {
	p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
}

// Find returns the place of this process. It refuses variables that it does not understand, with the fix, so that tasks
// of one job never train side by side by mistake.
//
// Several launchers may have left variables, since one starts another. The innermost counts: torchrun, then MPI, then
// Slurm, then variables for a whole node, then flags alone. The tasks of a launcher are a fact, so a flag that
// contradicts them is an error. A flag beats a variable that only asks for something.
func Find(getenv func(name string) string, flags Flags) (Placement, error) {
	e := env{getenv}
	want, err := flags.parse()
	if err != nil {
		return Placement{}, err
	}
	a, err := findAllocation(e)
	if err != nil {
		return Placement{}, err
	}
	p, err := e.find(want, a.step)
	if err != nil {
		return Placement{}, err
	}
	a.annotate(&p)
	return p, nil
}

// find asks one launcher after the other.
func (e env) find(want request, s *step) (Placement, error) {
	t, err := e.tasks()
	if err != nil {
		return Placement{}, err
	}
	if t != nil && s != nil {
		if t, err = innermost(e, t, s); err != nil {
			return Placement{}, err
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

func alone(want request) Placement {
	return Placement{Source: Alone, MinAgents: 1, MaxAgents: 1, LocalAgents: 1, Node: want.host}
}

// Ports made from the name of a job. They lie below net.ipv4.ip_local_port_range and the node ports of Kubernetes, from
// which systems give ports to any program, and below torchrun's, which begin at 29400.
const (
	firstPort = 20000
	ports     = 9000
	maxPort   = 65535
)

// Default ports of torchrun.
const (
	masterPort     = 29500
	rendezvousPort = 29400
)

// stepStride is prime to ports. It keeps the steps of a job away from the next jobs.
const stepStride = 1009

// stepPort returns the port of a step of Slurm. Jobs with close numbers have different ports, since the jobs of an
// array may share a node.
func stepPort(job, step uint64) int {
	return firstPort + int((job%ports+step%ports*stepStride)%ports)
}

func namedPort(name string) int {
	h := fnv.New32a()
	h.Write([]byte(name))
	return firstPort + int(h.Sum32()%ports)
}

func join(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// address checks host:port and returns its canonical form. The default port is port; 0: there is none.
func address(text string, port int) (string, error) {
	host, number, err := net.SplitHostPort(text)
	if err != nil && port > 0 && !strings.HasSuffix(text, ":") {
		host, number, err = strings.Trim(text, "[]"), strconv.Itoa(port), nil
	}
	if err != nil || !hostName(host) {
		return "", errors.New("want host:port, such as node01:29400")
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > maxPort {
		return "", fmt.Errorf("want a port from 1 to %d", maxPort)
	}
	return join(host, n), nil
}

// hostName reports whether a name may name a host, or is an address.
func hostName(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	if name == "" || len(name) > maxHostName {
		return false
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`[]/\,:@'"%`, c) >= 0 {
			return false
		}
	}
	return true
}

func loopback(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	ip, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && (ip.IsLoopback() || ip.IsUnspecified())
}

// The variables that give an address to meet at.
const (
	envMasterAddr    = "MASTER_ADDR"
	envMasterPort    = "MASTER_PORT"
	envPetMasterAddr = "PET_MASTER_ADDR"
	envPetMasterPort = "PET_MASTER_PORT"
	envPetRendezvous = "PET_RDZV_ENDPOINT"
)

// master returns the address in the first of these variables that is set, and the variable for messages; "": none is
// set.
func (e env) master(names ...string) (addr, from string, err error) {
	name, text := e.first(names...)
	if name == "" {
		return "", "", nil
	}
	from = show(name, text)
	if name == envPetRendezvous {
		if addr, err = address(text, rendezvousPort); err != nil {
			return "", "", fmt.Errorf("%s: %w", from, err)
		}
		return addr, from, nil
	}
	if !hostName(text) {
		return "", "", fmt.Errorf("%s: want the name or address of the host with rank 0", from)
	}
	port := masterPort
	if number, text := e.first(strings.TrimSuffix(name, "ADDR")+"PORT", envMasterPort); text != "" {
		if port, err = e.number(number, 1, maxPort); err != nil {
			return "", "", err
		}
	}
	return join(text, port), from, nil
}
