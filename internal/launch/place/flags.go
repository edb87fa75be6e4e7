package place

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Flags are the command line's flags, and the name of the host.
type Flags struct {
	NProc      int    // --nproc; 0: not given, or auto
	Nodes      string // --nnodes, N or MIN:MAX; "": not given
	NodeRank   int    // --node-rank; -1: not given
	Rendezvous string // --rendezvous; "": not given
	Hostname   string // of this host
}

const maxNodes = maxHosts

// A request contains the validated flags.
type request struct {
	Flags
	least, most int // nodes; 0: not given
}

// parse validates the flags individually.
func (f Flags) parse() (r request, err error) {
	r.Flags = f
	if f.Nodes != "" {
		if r.least, r.most, err = nodeRange(f.Nodes); err != nil {
			return r, fmt.Errorf("--nnodes %s: %w", terminal.Name(f.Nodes), err)
		}
	}
	if f.NodeRank < -1 {
		return r, fmt.Errorf("--node-rank %d: want 0 for the first node, 1 for the next, and so on", f.NodeRank)
	}
	if f.Rendezvous != "" {
		if r.Rendezvous, err = address(f.Rendezvous, 0); err != nil {
			return r, fmt.Errorf("--rendezvous %s: %w", terminal.Name(f.Rendezvous), err)
		}
	}
	return r, nil
}

// nodeRange parses N or MIN:MAX.
func nodeRange(text string) (least, most int, err error) {
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	least, _ = strconv.Atoi(first) // 0 on an error
	most, _ = strconv.Atoi(last)
	if least < 1 || most < least || most > maxNodes {
		return 0, 0, fmt.Errorf("want a number of nodes from 1 to %d, or MIN:MAX", maxNodes)
	}
	return least, most, nil
}

// leastAgents checks the flags against the started tasks, and returns the least number of agents: --nnodes MIN:MAX
// allows fewer nodes.
func (e *env) leastAgents(t *task, want request) int {
	flag, fix := "--nnodes "+want.Nodes, ""
	switch {
	case want.NProc > 1 && t.locals > 1 && want.NProc != t.locals:
		flag, fix = fmt.Sprintf("--nproc %d", want.NProc), "start one task per node, which then has that many processes"
	case want.NodeRank >= 0 && t.node >= 0 && want.NodeRank != t.node:
		flag, fix = fmt.Sprintf("--node-rank %d", want.NodeRank), fmt.Sprintf("pass this node's rank, %d", t.node)
	case want.Nodes == "":
		return t.size
	case t.nodes == 0:
		fix = "start equally many tasks on every node: otherwise the number of nodes is unknown"
	case want.least > t.nodes || want.most < t.nodes:
		flag, fix = fmt.Sprintf("%s, where there are %d nodes,", flag, t.nodes), "start tasks on that many nodes"
	case want.least == t.nodes:
		return t.size
	case !t.even:
		fix = "start equally many tasks on every node, so that the size without a node is known"
	default:
		return want.least * (t.size / t.nodes)
	}
	e.fail("%s contradicts what %s has started: %d tasks (%s), %d on this node. Leave the flag out, or %s",
		flag, t.name, t.size, set(t.sizeVar, t.size), t.locals, fix)
	return t.size
}
