//go:build !portable

package cpu

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// ownCores returns the size of the calling thread's CPU affinity mask, which may change later.
func ownCores() int {
	var set unix.CPUSet
	// SchedGetaffinity fails if the machine has more cores than a CPUSet.
	if err := unix.SchedGetaffinity(0, &set); err != nil || set.Count() == 0 {
		return runtime.NumCPU()
	}
	return set.Count()
}
