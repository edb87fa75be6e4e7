package cluster

import (
	"context"
	"fmt"
	"sync"
)

// A runDir implements RunDir for the agents of a test's job.
type runDir struct {
	mu     sync.Mutex
	number int
	newest []byte
}

func (r *runDir) Prepare(_ context.Context, w Assignment) ([]byte, error) {
	return fmt.Appendf(nil, "payload %d", w.Generation), nil
}

func (r *runDir) Claim(_ context.Context, _ []byte, number int, decision []byte) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if decision != nil && number > r.number {
		r.number, r.newest = number, decision
	}
	return r.newest, nil
}

// runDirs holds a directory for each test's job, by the port of its rendezvous.
var runDirs sync.Map

func runDirOf(port int) *runDir {
	r, _ := runDirs.LoadOrStore(port, new(runDir))
	return r.(*runDir)
}
