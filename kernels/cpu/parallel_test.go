package cpu

import (
	"runtime"
	"testing"
)

// Kernels compute on GOMAXPROCS goroutines, but not on more than the process's cores if it is bound to some.
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
