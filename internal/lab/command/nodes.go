package command

import (
	"os"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/place"
)

// place finds where this process stands among the nodes of a job, by the flags and by what a launcher of
// several nodes has set.
func (o *Options) place() (place.Place, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	nproc, _ := strconv.Atoi(o.NProc) // what is wrong with it, resolve says
	at, err := place.Find(launch.Getenv, place.Flags{
		NProc: max(0, nproc), Nodes: o.NNodes, NodeRank: o.NodeRank, Rendezvous: o.Rendezvous, Hostname: host,
	})
	if err != nil {
		return at, &InputError{err}
	}
	if o.show() != launch.ShowNone {
		for _, note := range at.Notes {
			o.printer().Note(note)
		}
	}
	return at, nil
}

// oneNode refuses a command that runs on one node where several processes of it were started, each of
// which would do the same beside the others.
func (o *Options) oneNode() error {
	at, err := o.place()
	if err != nil || !at.Several() {
		return err
	}
	return inputf("this is one of %d tasks that %s has started, and this command runs on one node: start it once, as "+
		"in srun --ntasks 1 or mpirun -n 1",
		at.MaxAgents, strings.ToLower(at.Source))
}

// underSlurm reports whether this is part of a job of Slurm, which sends SIGTERM more than once.
func underSlurm() bool { return launch.Getenv("SLURM_JOB_ID") != "" }
