package launch

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// leastSpace is the address space below which Go's runtime ends a launcher, or its workers, in the
// middle of their work. What it reserves for itself is most of that.
const leastSpace = 1 << 30

// addressSpace is the limit of this process's address space in bytes, where there is one.
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
