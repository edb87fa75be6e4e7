package launch

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
)

// Ranks that share cores wait for each other many times in a step. By default the kernel moves them from core
// to core as they wake, away from their data in the caches. So if every core gets the same number of
// ranks, cprun pins each rank to one core. With a core each, training measured 1.1 times as fast on two cores, and
// 0.9 times beside another user's process that computes all the time.

// maxCores is the number of cores in a mask of the system. On larger hosts the ranks are not pinned.
const maxCores = 1024

// shareOf returns the core to which a rank of a node is pinned, or nil. It is nil if there are more cores than ranks,
// if the ranks do not divide evenly, or if a limit on processor time (procs at once) leaves fewer cores, since the
// limit does not name them.
func shareOf(cores []int, procs, rank, ranks int) *int {
	n := len(cores)
	if n < 2 || procs != n || ranks < n || ranks%n != 0 {
		return nil
	}
	return &cores[rank*n/ranks]
}

// core returns the core to which a rank of this launcher is pinned, or nil. If the user has set GOMAXPROCS
// (given), the user has placed the ranks, and cprun pins none.
func (h *hello) core(given bool) *int {
	if given || h.sharers() != h.LocalWorldSize {
		return nil
	}
	return shareOf(ownCores(), runtime.GOMAXPROCS(0), h.LocalRank, h.LocalWorldSize)
}

// crowded returns the ranks of a node, and the fewer cores that they share; 0: there are enough cores, or all of the
// host's. own is the size of this launcher's mask, local the number of its ranks. If the node has more launchers, each
// may have a mask of its own, so that only the number of cores that Slurm has given to all of them counts; 0: not
// known.
func crowded(own, host, given, local, ranks int) (n, cores int) {
	n, cores = local, own
	if ranks > local && given > 0 {
		n, cores = ranks, max(own, given)
	}
	if own == 0 || own >= host || n <= cores {
		return 0, 0
	}
	return n, cores
}

// warnCrowded warns, once in a job, of ranks that share too few cores: a batch system gives one core to a task that
// asks for no more.
func (a *agent) warnCrowded(s *Start) {
	if s.Number > 0 || s.Place.FirstRank > 0 {
		return
	}
	ranks := a.job.NProc
	if len(s.Hosts) > 0 {
		ranks = len(slices.DeleteFunc(slices.Clone(s.Hosts), func(h string) bool { return h != s.Hosts[0] }))
	}
	given, _ := strconv.Atoi(os.Getenv(envSlurmCPUs)) // 0: not under Slurm
	host := hostCores()
	if n, cores := crowded(len(ownCores()), host, given, a.job.NProc, ranks); n > 0 {
		a.notice("warning: %d ranks of this node share %d of its %d cores, and will be slow; under Slurm, submit "+
			"with --exclusive or "+
			"--cpus-per-task=%d and use srun --cpu-bind=none; elsewhere, widen the CPU mask (taskset, cpuset)",
			n, cores, host, n)
	}
}

// KeepToCore pins all threads of this process, present and future, to the core that the launcher has chosen, and
// returns that core, or -1 if the rank may use all cores of the launcher. A rank that shares its core runs one
// goroutine at a time. A second one would be a second thread on that core, and stop the first, or another rank, for
// each incoming message. One thread takes the messages after its kernel, or after 10 ms; meanwhile the other ranks
// of the core compute. A rank with a core of its own has the second thread, since its peers would otherwise wait
// as long for its messages.
func (w *Worker) KeepToCore() (core int, err error) {
	if w.core == nil {
		return -1, nil
	}
	shares := w.LocalWorldSize > len(ownCores())
	if err := pin(*w.core); err != nil {
		return -1, fmt.Errorf("core %d for %w", *w.core, err)
	}
	if shares {
		runtime.GOMAXPROCS(1)
	}
	return *w.core, nil
}
