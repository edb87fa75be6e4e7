package launch

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestOutOfMemoryIsTold checks that OutOfMemory recognizes the messages of this package and its libraries, and no
// ambiguous ones.
func TestOutOfMemoryIsTold(t *testing.T) {
	killed, _ := explainSignal(unix.SIGKILL, true)
	unknown, _ := explainSignal(unix.SIGKILL, false)
	for report, want := range map[string]bool{
		killed:                                true,
		unknown:                               false,
		"fatal error: runtime: out of memory": true,
		"cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory":       true,
		"mmap: cannot allocate memory":                              true,
		"attention: CUDA_ERROR_ILLEGAL_ADDRESS":                     false,
		"listen tcp 203.0.113.1:9: cannot assign requested address": false,
	} {
		if got := OutOfMemory(report); got != want {
			t.Errorf("OutOfMemory(%q) is %v", report, got)
		}
	}
}
