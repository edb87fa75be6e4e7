package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
)

// maxKernelFile bounds the bytes that are read from any file of the kernel.
const maxKernelFile = 1 << 20

// HostMemory returns the memory of this node in bytes, and how much of it the processes of a job may
// use together, which control groups (a container, a job step) may bound; 0: not known.
func HostMemory() (total, usable int64) {
	total = totalMemory()
	usable = memoryLimit("/proc/self/cgroup", "/sys/fs/cgroup")
	if usable == 0 || total > 0 && usable > total {
		usable = total
	}
	return total, usable
}

// memoryLimit returns the least limit of this control group and of its parents; 0: none.
func memoryLimit(selfCgroup, root string) (least int64) {
	for _, g := range memoryGroups(selfCgroup, root) {
		file := "memory.max"
		if g.v1 {
			file = "memory.limit_in_bytes"
		}
		for path := g.path; ; path = filepath.Dir(path) {
			text, err := files.Read(filepath.Join(g.mount, path, file), maxKernelFile)
			if err == nil { // in a container with the host's path, the container's own group is at the root
				n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64) // or "max"
				if err == nil && n > 0 && (least == 0 || n < least) {
					least = n
				}
			}
			if path == filepath.Dir(path) {
				break
			}
		}
	}
	return least
}

// A group is a control group of this process that may account for memory.
type group struct {
	mount, path string
	v1          bool
}

// memoryGroups reads /proc/self/cgroup.
func memoryGroups(selfCgroup, root string) (groups []group) {
	text, err := files.Read(selfCgroup, maxKernelFile)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		// hierarchy-ID:controllers:path, with an empty list of controllers for v2.
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		switch part[1] {
		case "":
			groups = append(groups, group{mount: root, path: part[2]})
		case "memory":
			groups = append(groups, group{mount: filepath.Join(root, "memory"), path: part[2], v1: true})
		}
	}
	return groups
}

// leastSpace is the address space below which Go's runtime ends a launcher, or its workers, in the
// middle of their work. What it reserves for itself is most of that.
const leastSpace = 1 << 30

// addressSpace returns the limit of this process's address space in bytes, where there is one.
func addressSpace() (limit uint64, ok bool) {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_AS, &r); err != nil || r.Cur == unix.RLIM_INFINITY {
		return 0, false
	}
	return r.Cur, true
}

// CheckLimits returns an error if a limit of this process is too low for any job.
func CheckLimits() error { return checkSpace(addressSpace()) }

func checkSpace(limit uint64, limited bool) error {
	if limited && limit < leastSpace {
		return fmt.Errorf("the limit of address space (ulimit -v) is %d KiB, and a process of cprun needs %d at "+
			"least, beside its model; raise it: ulimit -v unlimited", limit>>10, leastSpace>>10)
	}
	return nil
}

// oomKills returns how many processes of this control group the kernel has killed for want of
// memory, as cgroup v2 (memory.events) or v1 (memory.oom_control) tells it; ok is false
// where neither can be read. The files' folder is an argument so that it can be tested.
func oomKills(selfCgroup, root string) (n int64, ok bool) {
	for _, g := range memoryGroups(selfCgroup, root) {
		file := "memory.events"
		if g.v1 {
			file = "memory.oom_control"
		}
		// Inside a container the path may be the host's, which is not visible; the
		// container's own group is then mounted at the root.
		for _, path := range []string{filepath.Join(g.mount, g.path, file), filepath.Join(g.mount, file)} {
			if n, ok := keyValue(path, "oom_kill"); ok {
				return n, true
			}
		}
	}
	return 0, false
}

// keyValue reads one "key number" line of a file.
func keyValue(path, key string) (int64, bool) {
	text, err := files.Read(path, maxKernelFile)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name == key {
			n, err := strconv.ParseInt(value, 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// shortOfMemory are the words by which a failure's report says that memory was short: this package's
// of the kernel's killer, Go's, the system's, and those of CUDA's libraries.
var shortOfMemory = []string{
	outOfMemoryKiller, "runtime: out of memory", "runtime: cannot allocate memory", "cannot allocate memory",
	"CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
	"DEVICE_ALLOCATION_FAILED", "HOST_ALLOCATION_FAILED", "out of memory",
}

// OutOfMemory reports whether a failure's report says that the memory of the host or of a device was too
// small. A process that was killed, and no one knows by whom, is none.
func OutOfMemory(report string) bool {
	return slices.ContainsFunc(shortOfMemory, func(words string) bool { return strings.Contains(report, words) })
}

// Ranks that share cores wait for each other many times in a step. By default the kernel moves them from core
// to core as they wake, away from their data in the caches. So if every core gets the same number of
// ranks, cprun pins each rank to one core. With a core each, training measured 1.1 times as fast on two cores, and
// 0.9 times beside another user's process that computes all the time.

// maxCores is the number of cores in a mask of the system. On larger hosts the ranks are not pinned.
const maxCores = 1024

// shareOf returns the core to which a rank of a node is pinned, or nil. It is nil if there are more cores than ranks,
// if the ranks do not divide evenly, or if a limit on processor time (procs at once) leaves fewer cores, since the
// limit does not name them.
func coreForRank(cores []int, procs, rank, ranks int) *int {
	n := len(cores)
	if n < 2 || procs != n || ranks < n || ranks%n != 0 {
		return nil
	}
	return &cores[rank*n/ranks]
}

// core returns the core to which a rank of this launcher is pinned, or nil. If the user has set GOMAXPROCS
// (given), the user has placed the ranks, and cprun pins none.
func (h *hello) chooseCore(given bool) *int {
	if given || h.ranksSharingCores() != h.LocalWorldSize {
		return nil
	}
	return coreForRank(ownCores(), runtime.GOMAXPROCS(0), h.LocalRank, h.LocalWorldSize)
}

// crowded returns the ranks of a node, and the fewer cores that they share; 0: there are enough cores, or all of the
// host's. own is the size of this launcher's mask, local the number of its ranks. If the node has more launchers, each
// may have a mask of its own, so that only the number of cores that Slurm has given to all of them counts; 0: not
// known.
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

// warnCrowded warns, once in a job, of ranks that share too few cores: a batch system gives one core to a task that
// asks for no more.
func (l *nodeLauncher) warnOversubscribed(s *Start) {
	if s.Number > 0 || s.Ranks.FirstRank > 0 {
		return
	}
	ranks := l.job.NProc
	if len(s.Hosts) > 0 {
		ranks = len(slices.DeleteFunc(slices.Clone(s.Hosts), func(h string) bool { return h != s.Hosts[0] }))
	}
	given, _ := strconv.Atoi(os.Getenv(envSlurmCPUs)) // 0: not under Slurm
	host := hostCores()
	if n, cores := oversubscribed(len(ownCores()), host, given, l.job.NProc, ranks); n > 0 {
		l.notice("warning: %d ranks of this node share %d of its %d cores, and will be slow; under Slurm, submit "+
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
