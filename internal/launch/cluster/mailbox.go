package cluster

import (
	"errors"
	"sync"
)

// errClosed is what a Cohort answers after Close.
var errClosed = errors.New("this agent has left the job")

// mailbox holds the calls of those who do not wait: few, since each start has few.
type mailbox struct {
	ready chan struct{} // room for one

	mu    sync.Mutex
	calls []func() // guarded by mu
}

func (b *mailbox) init() { b.ready = make(chan struct{}, 1) }

// put never blocks.
func (b *mailbox) put(f func()) {
	b.mu.Lock()
	b.calls = append(b.calls, f)
	b.mu.Unlock()
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

// take returns what is there, in order.
func (b *mailbox) take() []func() {
	b.mu.Lock()
	defer b.mu.Unlock()
	calls := b.calls
	b.calls = nil
	return calls
}
