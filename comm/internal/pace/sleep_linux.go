//go:build !portable

package pace

import (
	"syscall"
	"time"
)

// sleep blocks the calling thread. A time.Sleep in an idle process lasts at least a millisecond. A signal
// ends the sleep early, and the caller then looks again sooner.
func sleep(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil)
}
