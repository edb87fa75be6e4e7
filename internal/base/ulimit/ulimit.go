// Package ulimit ends a program that may open almost no file, with a message. Import it for this effect:
//
//	import _ "github.com/cprun/cprun/internal/base/ulimit"
//
// With few free descriptors, the first timer or file makes the Go runtime print a stack, and dependencies start a
// timer or open a file when they are initialized. So the check runs in init. Go initializes ready packages in the
// order of their paths. This one imports only what those dependencies import too (not fmt), so it comes first.
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
