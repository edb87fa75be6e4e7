package cpu

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// ownCores is how many cores the calling thread may run on, which may be fewer than when the process began.
func ownCores() int {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil || set.Count() == 0 { // on a machine with more cores than it has room for
		return runtime.NumCPU()
	}
	return set.Count()
}
