package launch

import (
	"path/filepath"
	"strconv"
	"strings"

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
