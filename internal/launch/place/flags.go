package place

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Flags are the typed flags, and the name of the host.
type Flags struct {
	// NProc is --nproc; 0: not given, or auto.
	NProc int
	// Nodes is --nnodes, N or MIN:MAX; "": not given.
	Nodes string
	// NodeRank is --node-rank; -1: not given.
	NodeRank int
	// Rendezvous is --rendezvous; "": not given.
	Rendezvous string
	// Hostname is the name of this host.
	Hostname string
}

// maxNodes bounds the nodes of a job.
const maxNodes = maxHosts

// A request is the parsed form of the flags.
type request struct {
	nproc       int
	nodes       string // --nnodes as it was typed, "" if it was not
	least, most int    // of nodes; 0: not given
	nodeRank    int    // -1: not given
	meet        string // "": not given
	host        string
}

// parse checks the flags one by one.
func (f Flags) parse() (request, error) {
	r := request{nproc: f.NProc, nodes: f.Nodes, nodeRank: f.NodeRank, host: f.Hostname}
	var err error
	if f.Nodes != "" {
		if r.least, r.most, err = nodeRange(f.Nodes); err != nil {
			return r, fmt.Errorf("--nnodes %s: %w", terminal.Name(f.Nodes), err)
		}
	}
	if f.NodeRank < -1 {
		return r, fmt.Errorf("--node-rank %d: want 0 for the first node, 1 for the next, and so on", f.NodeRank)
	}
	if f.Rendezvous != "" {
		if r.meet, err = address(f.Rendezvous, 0); err != nil {
			return r, fmt.Errorf("--rendezvous %s: %w", terminal.Name(f.Rendezvous), err)
		}
	}
	return r, nil
}

// nodeRange reads N or MIN:MAX.
func nodeRange(text string) (least, most int, err error) {
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	least, err1 := strconv.Atoi(first)
	most, err2 := strconv.Atoi(last)
	if err1 != nil || err2 != nil || least < 1 || most < least || most > maxNodes {
		return 0, 0, fmt.Errorf("want a number of nodes from 1 to %d, or MIN:MAX", maxNodes)
	}
	return least, most, nil
}

// A started is a launcher's own account of its tasks, to check the flags against.
type started struct {
	by       string // srun, and so on
	tasks    int
	evidence string // the variable that says so
	nodes    int    // 0: not known
	node     int    // the rank of this node; -1: not known
	local    int    // tasks on this node
	even     bool   // all nodes have that many
}

// agree checks the flags against what was started, and returns the least number of agents: --nnodes
// MIN:MAX lets a job go on with fewer nodes.
func (s started) agree(want request) (least int, err error) {
	fail := func(flag, fix string, args ...any) (int, error) {
		return 0, fmt.Errorf("%s contradicts what %s has started: %d tasks (%s), %d on this node. Leave the flag "+
			"out, or %s",
			flag, s.by, s.tasks, s.evidence, s.local, fmt.Sprintf(fix, args...))
	}
	if want.nproc > 1 && s.local > 1 && want.nproc != s.local {
		return fail(fmt.Sprintf("--nproc %d", want.nproc), "start one task on each node, which then has that many "+
			"processes")
	}
	if want.nodeRank >= 0 && s.node >= 0 && want.nodeRank != s.node {
		return fail(fmt.Sprintf("--node-rank %d", want.nodeRank), "give it this node's, %d", s.node)
	}
	switch {
	case want.nodes == "":
		return s.tasks, nil
	case s.nodes == 0:
		return fail("--nnodes "+want.nodes, "start as many tasks on every node: where some have more than others, "+
			"nobody tells on how many nodes they are")
	case want.least > s.nodes || want.most < s.nodes:
		return fail(fmt.Sprintf("--nnodes %s, where there are %d nodes,", want.nodes, s.nodes),
			"start tasks on that many nodes")
	case want.least < s.nodes && !s.even:
		return fail("--nnodes "+want.nodes, "start as many tasks on every node, so that it is known what is left "+
			"without one")
	}
	return want.least * (s.tasks / s.nodes), nil
}
