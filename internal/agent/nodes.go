package agent

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/launch"
)

// oneNode checks the flags for several nodes. This build runs the processes of one, so they are
// taken where one suffices, as scripts written for torchrun have them on a single machine.
func (o *Options) oneNode() error {
	least, most, err := nodes(o.NNodes)
	if err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(o.Rendezvous); o.Rendezvous != "" && err != nil {
		return inputf("--rendezvous %q: want host:port, such as localhost:29400", o.Rendezvous)
	}
	if least > 1 || o.NodeRank > 0 {
		return inputf("--nnodes %s --node-rank %d: this build runs the processes of one node; leave the two flags out", o.NNodes, o.NodeRank)
	}
	if o.NodeRank < 0 {
		return inputf("--node-rank %d: want 0, the only node", o.NodeRank)
	}
	if most > 1 && o.show() != launch.ShowNone {
		fmt.Fprintf(o.Stderr, "--nnodes %s: this build runs the processes of one node, and waits for no other\n", o.NNodes)
	}
	return nil
}

// nodes reads N or MIN:MAX.
func nodes(text string) (least, most int, err error) {
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	least, err = strconv.Atoi(first)
	if err == nil {
		most, err = strconv.Atoi(last)
	}
	if err != nil || least < 1 || most < least {
		return 0, 0, inputf("--nnodes %q: want a number of nodes of at least 1, or MIN:MAX", text)
	}
	return least, most, nil
}
