// Package ulimit ends a program that may open almost no file, with a message. Import it for this effect:
//
//	import _ "github.com/cprun/cprun/internal/ulimit"
//
// With a limit below 8, the first timer or pipe makes the Go runtime print a stack, and a dependency starts a
// timer when it is initialized. So the check runs in init. Go initializes ready packages in the order of
// their paths, and this one needs only the standard library: it comes first.
package ulimit

import (
	"fmt"
	"os"
	"syscall"
)

// least is the limit that a run of one rank needs.
const least = 32

func init() {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil && files.Cur < least {
		fmt.Fprintf(os.Stderr, "cprun: the limit on open files is %d; raise it: ulimit -n 1024\n", files.Cur)
		os.Exit(2)
	}
}
