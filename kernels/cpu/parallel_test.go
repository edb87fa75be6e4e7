package cpu

import (
	"runtime"
	"testing"
)

// Kernels compute on as many goroutines as may run at once, but on no more than there are cores for where the process keeps to
// fewer than it began with.
func TestWorkers(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	c := newTestCPU(t)
	if got := ownCores(); got != c.cores || got < 1 || got > runtime.NumCPU() {
		t.Errorf("%d cores, of kernels %d, of the process %d", got, c.cores, runtime.NumCPU())
	}
	for cores, want := range map[int]int{runtime.NumCPU(): 3, runtime.NumCPU() - 1: min(3, runtime.NumCPU()-1)} {
		if c.cores = cores; cores > 0 && c.workers() != want {
			t.Errorf("on %d of %d cores %d goroutines compute, want %d", cores, runtime.NumCPU(), c.workers(), want)
		}
	}
}
