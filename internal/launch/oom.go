package launch

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

// oomKills is how many processes of this control group the kernel has killed for want of
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
// small. A process that was killed, and nobody knows by whom, is none.
func OutOfMemory(report string) bool {
	return slices.ContainsFunc(shortOfMemory, func(words string) bool { return strings.Contains(report, words) })
}
