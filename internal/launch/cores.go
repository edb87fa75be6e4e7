package launch

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ranks that share cores wait for each other many times in a step. Left alone, the kernel moves them from core
// to core as they wake, away from what they have in the caches. So where each core gets as many
// ranks as any other, one or more, each rank keeps to one. With a core each, training measured 1.1 times as fast on two cores, and
// 0.9 times beside a process of another that computes all the time.

// maxCores is how many cores a mask of the system's has room for here. On larger hosts ranks keep to none.
const maxCores = len(unix.CPUSet{}) * 8 * int(unsafe.Sizeof(unix.CPUSet{}[0]))

// ownCores lists the cores that this process may use, or nil where that is not known.
func ownCores() (cores []int) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil
	}
	for i := range maxCores {
		if set.IsSet(i) {
			cores = append(cores, i)
		}
	}
	return cores
}

// shareOf returns the one of cores that a rank of a node is to keep to, or nil: there are more cores than ranks, they
// do not come out even, or a limit of the system on processor time (procs at once) lets it use fewer, of
// which nobody has said which.
func shareOf(cores []int, procs, rank, ranks int) *int {
	n := len(cores)
	if n < 2 || procs != n || ranks < n || ranks%n != 0 {
		return nil
	}
	return &cores[rank*n/ranks]
}

// core returns the core that a rank of this launcher is to keep to, or nil. Who has set GOMAXPROCS has
// placed the ranks, and is left alone.
func (h *hello) core(given bool) *int {
	if given || h.sharers() != h.LocalWorldSize {
		return nil
	}
	return shareOf(ownCores(), runtime.GOMAXPROCS(0), h.LocalRank, h.LocalWorldSize)
}

// timerSlack is by how much the kernel may delay a sleep of a rank that shares its core, so that it can do
// with fewer wakeups: twenty times the default. Go's monitor (sysmon) of each process sleeps for 20 microseconds again and again
// where goroutines come and go; on a shared core each look stops another rank. With this they
// make a third fewer switches of context. What waits for data is not woken by a timer and is not delayed.
const timerSlack = time.Millisecond

// rarelyWoken has processes that the calling thread starts sleep that coarsely, until back is called. Threads
// and processes get it from those that make them, and an unprivileged process can set its own thread's only.
func rarelyWoken() (back func()) {
	was, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil || unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack), 0, 0, 0) != nil {
		return func() {} // which costs speed only
	}
	return func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(was), 0, 0, 0) }
}

// KeepToCore has all threads of this process, present and to come, run on the core that the launcher has
// chosen, and reports which that is. It is -1 where the rank may use all cores of the launcher. A rank that shares
// its core runs one goroutine at a time. A second would be a second thread on that core: it stops the first, or
// another rank, for each message that comes, where one thread takes the messages when its kernel has ended, or
// after 10 ms. Meanwhile the other ranks of the core compute. Where there are none, the peers would wait as long for
// what this rank has to send, so that it has the second thread.
func (w *Worker) KeepToCore() (core int, err error) {
	if w.core == nil {
		return -1, nil
	}
	shares := w.LocalWorldSize > len(ownCores())
	var set unix.CPUSet
	set.Set(*w.core)
	// A thread gets the cores of the one that makes it, so one look without a new thread is the last.
	seen := map[string]bool{}
	for fresh := true; fresh; {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return -1, err
		}
		fresh = false
		for _, t := range threads {
			if seen[t.Name()] {
				continue
			}
			seen[t.Name()], fresh = true, true
			id, err := strconv.Atoi(t.Name())
			if err == nil {
				err = unix.SchedSetaffinity(id, &set)
			}
			if err != nil && !errors.Is(err, unix.ESRCH) { // it may have ended meanwhile
				return -1, fmt.Errorf("core %d for thread %s: %w", *w.core, t.Name(), err)
			}
		}
	}
	if shares {
		runtime.GOMAXPROCS(1)
	}
	return *w.core, nil
}
