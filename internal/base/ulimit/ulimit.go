// Package ulimit exits with a message if the limit on open files is too low. Import it for this effect:
//
//	import _ "github.com/cprun/cprun/internal/base/ulimit"
//
// With few free descriptors, the Go runtime prints a stack at the first timer or file. Some dependencies already start
// a timer or open a file in init, so the check must run before. Go initializes ready packages in the order of their
// paths. This package comes first because it imports only packages (so, not fmt) that those dependencies also import.
package ulimit

import (
	"os"
	"strconv"
	"syscall"
)

// least is the limit that a run of one rank needs.
const least = 32

func init() {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil && files.Cur < least {
		os.Stderr.WriteString("cprun: the limit on open files is " + strconv.FormatUint(uint64(files.Cur), 10) +
			"; raise it: ulimit -n 1024\n")
		os.Exit(2)
	}
}
