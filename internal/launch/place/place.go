// Package place finds the place of this process among the tasks that a launcher of several nodes started: Slurm,
// torchrun, MPI, the operators of Kubernetes, or a user with flags.
//
// An agent is one process of cprun that a user or a launcher starts. With one task per node, the agent spawns a worker
// for each device. With one task per device, each task is an agent with one worker. Find returns this agent's
// Placement: its rank, the number of agents, and their rendezvous. It reads only its arguments, so tests describe each
// launcher as a table of variables.
//
//	p, err := place.Find(os.Getenv, place.Flags{NodeRank: -1, Hostname: host})
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

// Placement is the position of an agent among the agents of its job.
type Placement struct {
	// Source names the launcher of the agents: one of the constants above.
	Source string
	// Job names the job: equal for all its agents, and different after a requeue by Slurm. It is public.
	Job string
	// SlurmJob names the job for `scontrol requeue`; "" outside of Slurm. If it is set, a second SIGTERM does not end
	// the job at once: Slurm sends two.
	SlurmJob string
	// Rank is the rank of this agent; -1: the agents agree on it at the rendezvous. Rank 0 is at the rendezvous.
	Rank int
	// MinAgents and MaxAgents bound the number of agents.
	MinAgents, MaxAgents int
	// Workers is the number of processes of this agent: 1 if each task is for one device, 0 if --nproc or the number of
	// devices decides. Agents may differ: MPI may put two tasks on one node and one on another.
	Workers int
	// LocalRank is the rank of this agent among the LocalAgents on this node. If all devices of the node are visible,
	// the agent uses the device with that number.
	LocalRank, LocalAgents int

	Node       string   // name of this node: Slurm's, or else the host name
	Hosts      []string // names of all nodes by rank; nil: unknown
	Rendezvous string   // the address host:port at which the agents meet; "": there is one agent
	Notes      []string // lines for the user
}

// Several reports whether the job may have other agents.
func (p *Placement) Several() bool { return p.MaxAgents > 1 }

func (p *Placement) note(format string, args ...any) {
	p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
}

// Find returns the placement of this process. It refuses unclear variables with the fix, so that tasks of one job never
// train separately by mistake.
//
// Several launchers may have set variables, since one starts another. The innermost counts: torchrun, then MPI, then
// Slurm, then variables for a whole node, then flags alone. A launcher's tasks exist, so a flag that contradicts them
// is an error. A flag overrides a variable that only requests a value.
func Find(getenv func(name string) string, flags Flags) (Placement, error) {
	want, err := flags.parse()
	if err != nil {
		return Placement{}, err
	}
	e := &env{get: getenv}
	a := e.allocation()
	t := e.started()
	if a.step != nil {
		t = e.innermost(t, a.step)
	}
	var p Placement
	if t != nil {
		p = e.placeTask(t, want)
	} else {
		p = e.placeNode(want)
	}
	if e.err != nil {
		return Placement{}, e.err
	}
	a.annotate(&p)
	return p, nil
}

// Ports derived from the name of a job. They are below the ports that systems assign to programs
// (net.ipv4.ip_local_port_range, the node ports of Kubernetes) and below torchrun's, which start at 29400.
const (
	firstPort  = 20000
	ports      = 9000
	stepStride = 1009 // separates the steps of a job from the next jobs; coprime to ports
	maxPort    = 65535

	masterPort     = 29500 // torchrun's default ports
	rendezvousPort = 29400
)

// stepPort returns the port of a Slurm step. Jobs with close numbers have different ports, since the jobs of an array
// may share a node.
func stepPort(job, step uint64) int {
	return firstPort + int((job%ports+step%ports*stepStride)%ports)
}

func namedPort(name string) int {
	h := fnv.New32a()
	h.Write([]byte(name))
	return firstPort + int(h.Sum32()%ports)
}

func join(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// address validates host:port and returns its canonical form. port is the default port; 0: none.
func address(text string, port int) (string, error) {
	host, number, err := net.SplitHostPort(text)
	if err != nil && port > 0 {
		host, number = strings.Trim(text, "[]"), strconv.Itoa(port)
	}
	if !hostName(host) {
		return "", errors.New("want host:port, such as node01:29400")
	}
	n, _ := strconv.Atoi(number)
	if n < 1 || n > maxPort {
		return "", fmt.Errorf("want a port from 1 to %d", maxPort)
	}
	return join(host, n), nil
}

// hostName reports whether name is a valid host name or address.
func hostName(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	bad := func(c rune) bool { return c <= ' ' || c >= 0x7f || strings.ContainsRune(`[]/\,:@'"%`, c) }
	return name != "" && len(name) <= maxHostName && !strings.ContainsFunc(name, bad)
}

func loopback(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	ip, _ := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || ip.IsLoopback() || ip.IsUnspecified()
}

// meet returns the address of --rendezvous, else that of the first set variable, and its source; "": there is none.
func (e *env) meet(want request, names ...string) (addr, from string) {
	if want.Rendezvous != "" {
		return want.Rendezvous, "--rendezvous " + want.Rendezvous
	}
	name, text := e.first(names...)
	if name == "" {
		return "", ""
	}
	from = show(name, text)
	if name == "PET_RDZV_ENDPOINT" {
		addr, err := address(text, rendezvousPort)
		if err != nil {
			e.fail("%s: %w", from, err)
		}
		return addr, from
	}
	if !hostName(text) {
		e.fail("%s: want the name or address of the host with rank 0", from)
	}
	port := masterPort
	if number, _ := e.first(strings.TrimSuffix(name, "ADDR")+"PORT", "MASTER_PORT"); number != "" {
		port = e.number(number, 1, maxPort)
	}
	return join(text, port), from
}
