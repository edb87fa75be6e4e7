//go:build !portable

package cpu

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// ownCores returns the number of cores on which the calling thread may run; it may change while the process runs.
func ownCores() int {
	var set unix.CPUSet
	// on a machine with more cores than it has room for
	if err := unix.SchedGetaffinity(0, &set); err != nil || set.Count() == 0 {
		return runtime.NumCPU()
	}
	return set.Count()
}
