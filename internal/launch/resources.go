package launch

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/cores"
	"github.com/cprun/cprun/internal/base/files"
)

// maxKernelFile bounds the bytes read from a kernel file.
const maxKernelFile = 1 << 20

// cgroupRoot holds the control groups.
const cgroupRoot = "/sys/fs/cgroup"

// HostMemory returns this node's memory in bytes, and the part that a job may use within its control groups (a
// container, a job step); 0: unknown.
func HostMemory() (total, usable int64) {
	total = totalMemory()
	usable = memoryLimit("/proc/self/cgroup", cgroupRoot)
	if usable == 0 || total > 0 && usable > total {
		usable = total
	}
	return total, usable
}

// memoryLimit returns the smallest limit of this control group and its parents; 0: none.
func memoryLimit(selfCgroup, root string) (least int64) {
	for _, g := range memoryGroups(selfCgroup, root) {
		for path := g.path; ; path = filepath.Dir(path) {
			// In a container that sees the host's path, its own group is at the root.
			text, _ := files.Read(filepath.Join(g.mount, path, g.limit), maxKernelFile)
			n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64) // or "max"
			if err == nil && n > 0 && (least == 0 || n < least) {
				least = n
			}
			if path == filepath.Dir(path) {
				break
			}
		}
	}
	return least
}

// A group is a control group of this process that may limit memory, and the names of its files.
type group struct {
	mount, path   string
	limit, events string
}

func memoryGroups(selfCgroup, root string) (groups []group) {
	text, _ := files.Read(selfCgroup, maxKernelFile)
	for line := range strings.Lines(string(text)) {
		// hierarchy-ID:controllers:path, with an empty list of controllers for v2.
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(part) != 3:
		case part[1] == "":
			groups = append(groups, group{root, part[2], "memory.max", "memory.events"})
		case part[1] == "memory":
			groups = append(groups, group{filepath.Join(root, "memory"), part[2], "memory.limit_in_bytes",
				"memory.oom_control"})
		}
	}
	return groups
}

// leastSpace is the least address space of a launcher or worker. Go's runtime reserves most of it, and fails without it
// in the middle of work.
const leastSpace = 1 << 30

// limitOf returns a limit of this process, if there is one.
func limitOf(resource int) (limit uint64, ok bool) {
	var r unix.Rlimit
	err := unix.Getrlimit(resource, &r)
	return r.Cur, err == nil && r.Cur < math.MaxInt64
}

// LockedMemory returns this process's limit of locked memory in bytes, if there is one. Root has none.
func LockedMemory() (limit int64, ok bool) {
	n, ok := limitOf(unix.RLIMIT_MEMLOCK)
	return int64(n), ok && os.Geteuid() != 0
}

// CheckLimits returns an error if a limit of this process is too low for any job.
func CheckLimits() error { return checkSpace(limitOf(unix.RLIMIT_AS)) }

func checkSpace(limit uint64, limited bool) error {
	if limited && limit < leastSpace {
		return fmt.Errorf("the limit of address space (ulimit -v) is %d KiB; a cprun process needs at least %d KiB "+
			"in addition to its model: raise it with ulimit -v unlimited", limit>>10, leastSpace>>10)
	}
	return nil
}

var oomKillLine = regexp.MustCompile(`(?m)^oom_kill (\d{1,18})$`)

// oomKills returns the number of processes of this control group that the kernel killed for lack of memory; -1:
// unknown.
func oomKills(selfCgroup, root string) int64 {
	for _, g := range memoryGroups(selfCgroup, root) {
		// In a container the path may be the host's. The container's own group is then mounted at the root.
		for _, path := range []string{g.path, "."} {
			text, _ := files.Read(filepath.Join(g.mount, path, g.events), maxKernelFile)
			if m := oomKillLine.FindSubmatch(text); m != nil {
				n, _ := strconv.ParseInt(string(m[1]), 10, 64)
				return n
			}
		}
	}
	return -1
}

// shortOfMemory contains the texts in failure reports that indicate a lack of memory: from this package, Go, the
// system, and CUDA's libraries.
var shortOfMemory = []string{
	outOfMemoryKiller, "runtime: out of memory", "runtime: cannot allocate memory", "cannot allocate memory",
	"CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
	"DEVICE_ALLOCATION_FAILED", "HOST_ALLOCATION_FAILED", "out of memory",
}

// OutOfMemory reports whether a failure report indicates too little memory on the host or a device. A SIGKILL from an
// unknown sender does not count.
func OutOfMemory(report string) bool {
	return slices.ContainsFunc(shortOfMemory, func(words string) bool { return strings.Contains(report, words) })
}

// Ranks that share cores wait for each other many times in a step. By default the kernel moves them from core
// to core as they wake, away from their data in the caches. So if every core gets the same number of
// ranks, cprun pins each rank to one core. With a core each, training measured 1.1 times as fast on two cores, and
// 0.9 times beside another user's process that computes all the time.

// coreForRank returns the core to which a rank of a node is pinned, or nil. It is nil if there are more cores than
// ranks, if the ranks do not divide evenly, or if a limit on processor time (procs at once) leaves fewer cores, since
// the limit does not name them.
func coreForRank(cores []int, procs, rank, ranks int) *int {
	n := len(cores)
	if n < 2 || procs != n || ranks < n || ranks%n != 0 {
		return nil
	}
	return &cores[rank*n/ranks]
}

// chooseCore returns the core to which a rank of this launcher is pinned, or nil. If the user has set GOMAXPROCS
// (given), cprun pins none.
func (h *hello) chooseCore(given bool) *int {
	if given || h.ranksSharingCores() != h.LocalWorldSize {
		return nil
	}
	return coreForRank(ownCores(), runtime.GOMAXPROCS(0), h.LocalRank, h.LocalWorldSize)
}

// oversubscribed returns a node's number of ranks and of shared cores if the ranks share fewer cores than the host has;
// n is 0 otherwise. own is the size of this launcher's mask, local its number of ranks. If the node has more launchers,
// each may have its own mask, so only Slurm's number of cores for all of them counts; 0: unknown.
func oversubscribed(own, host, given, local, ranks int) (n, cores int) {
	n, cores = local, own
	if ranks > local && given > 0 {
		n, cores = ranks, max(own, given)
	}
	if own == 0 || own >= host || n <= cores {
		return 0, 0
	}
	return n, cores
}

// warnOversubscribed warns once in a job of ranks that share too few cores: a batch system gives one core to a task
// that requests no more.
func (l *nodeLauncher) warnOversubscribed(s *Start) {
	if s.Number > 0 || s.Ranks.FirstRank > 0 {
		return
	}
	ranks := l.job.NProc
	if len(s.Hosts) > 0 {
		ranks = len(slices.DeleteFunc(slices.Clone(s.Hosts), func(h string) bool { return h != s.Hosts[0] }))
	}
	given, _ := strconv.Atoi(os.Getenv(envSlurmCPUs)) // 0: not under Slurm
	host := cores.Online()
	if n, cores := oversubscribed(len(ownCores()), host, given, l.job.NProc, ranks); n > 0 {
		l.notice("warning: %d ranks of this node share %d of its %d cores, and will be slow; under Slurm, submit "+
			"with --exclusive or "+
			"--cpus-per-task=%d and use srun --cpu-bind=none; elsewhere, widen the CPU mask (taskset, cpuset)",
			n, cores, host, n)
	}
}

// KeepToCore pins all threads of this process, present and future, to the core that the launcher chose. It returns that
// core, or -1 if the rank may use all cores. A rank that shares its core runs one goroutine at a time: a second thread
// would preempt the first, or another rank, for each incoming message. So one thread receives messages after its
// kernel, or after 10 ms, while other ranks compute. A rank with its own core has the second thread, since its peers
// would otherwise wait that long.
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
