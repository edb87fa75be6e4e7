package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// workers is how many goroutines compute at once. A process that keeps to fewer cores than it began with has a thread
// for messages, perhaps, but computes on no more goroutines than it has cores.
func (c *Kernels) workers() int {
	n := runtime.GOMAXPROCS(0)
	if c.cores < runtime.NumCPU() {
		n = min(n, c.cores)
	}
	return n
}

// each runs f(0) ... f(n-1) on up to so many goroutines as workers says, and returns when all are done.
// Pieces are handed out as workers come free; for results that do not depend on who does
// what, no two pieces may write the same element.
func (c *Kernels) each(n int, f func(i int)) {
	c.split(n, func(_ *scratch, i int) { f(i) })
}

// split is each with the scratch memory of the worker. Only work on the stream calls it,
// so one call at a time uses the scratch.
func (c *Kernels) split(n int, f func(s *scratch, i int)) {
	workers := max(1, min(n, c.workers()))
	for len(c.scratch) < workers {
		c.scratch = append(c.scratch, new(scratch))
	}
	var next atomic.Int64
	work := func(s *scratch) {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			f(s, i)
		}
	}
	var wg sync.WaitGroup
	for _, s := range c.scratch[1:workers] {
		wg.Go(func() { work(s) }) // ends when the pieces are used up; Wait below waits for it
	}
	work(c.scratch[0])
	wg.Wait()
}
