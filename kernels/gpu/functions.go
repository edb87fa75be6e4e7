//go:build cuda

package gpu

import (
	"sync"

	"github.com/cprun/cprun/internal/base/cuda"
)

// functionKey says which function is meant, and how much dynamic shared memory it is launched with
// at most, in bytes.
type functionKey struct {
	program, name string
	shared        int
}

// functionCache finds each function of the driver once. Any goroutine may use it. A function that
// is known is found without an allocation, since that is on the way of every launch.
type functionCache struct {
	// find asks the driver for a function.
	find func(functionKey) (*cuda.Function, error)

	mu    sync.RWMutex
	known map[functionKey]*cuda.Function // guarded by mu
}

func newFunctionCache(find func(functionKey) (*cuda.Function, error)) *functionCache {
	return &functionCache{find: find, known: map[functionKey]*cuda.Function{}}
}

// get returns the function of k. An error is not kept: the next call tries again.
func (c *functionCache) get(k functionKey) (*cuda.Function, error) {
	c.mu.RLock()
	f := c.known[k]
	c.mu.RUnlock()
	if f != nil {
		return f, nil
	}
	return c.add(k)
}

func (c *functionCache) add(k functionKey) (*cuda.Function, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.known[k]; f != nil {
		return f, nil
	}
	// The driver has one limit of shared memory for a function, which must not become lower for those
	// that have it already.
	most := k
	for other := range c.known {
		if other.program == k.program && other.name == k.name {
			most.shared = max(most.shared, other.shared)
		}
	}
	f, err := c.find(most)
	if err == nil {
		c.known[k] = f
	}
	return f, err
}
