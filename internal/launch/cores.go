package launch

import (
	"fmt"
	"runtime"
)

// Ranks that share cores wait for each other many times in a step. By default the kernel moves them from core
// to core as they wake, away from their data in the caches. So if every core gets the same number of
// ranks, cprun pins each rank to one core. With a core each, training measured 1.1 times as fast on two cores, and
// 0.9 times beside another user's process that computes all the time.

// maxCores is the number of cores in a mask of the system. On larger hosts the ranks are not pinned.
const maxCores = 1024

// shareOf returns the core to which a rank of a node is pinned, or nil. It is nil if there are more cores than ranks, if
// the ranks do not divide evenly, or if a limit on processor time (procs at once) leaves fewer cores, since the
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
