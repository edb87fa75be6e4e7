package launch

import (
	"io"
	"sync"
)

// A console writes whole lines to the launcher's stderr from its own goroutine, so that callers do not block.
type console struct {
	w     io.Writer
	queue chan []byte
	quit  chan struct{}
	done  chan struct{}
}

func newConsole(w io.Writer) *console {
	c := &console{w, make(chan []byte, 32), make(chan struct{}), make(chan struct{})}
	go c.run() // ended by close, which waits for it
	return c
}

func (c *console) run() {
	defer close(c.done)
	for {
		select {
		case b := <-c.queue:
			c.w.Write(b) // an error does not affect the job
		case <-c.quit:
			for {
				select {
				case b := <-c.queue:
					c.w.Write(b)
				default:
					return
				}
			}
		}
	}
}

// write queues b and takes ownership. It gives up when abandon is closed.
func (c *console) write(b []byte, abandon <-chan struct{}) {
	select {
	case c.queue <- b:
	case <-abandon:
	case <-c.quit:
	}
}

func (c *console) close() {
	close(c.quit)
	<-c.done
}

// maxWaiting bounds the queued events before progress events are dropped. A stopped terminal must neither stop training
// nor fill the memory.
const maxWaiting = 4096

// A mailbox runs calls in order on its own goroutine.
type mailbox struct {
	done chan struct{}

	mu      sync.Mutex
	wake    *sync.Cond
	waiting []func() // guarded by mu
	closed  bool     // guarded by mu
}

func newMailbox() *mailbox {
	m := &mailbox{done: make(chan struct{})}
	m.wake = sync.NewCond(&m.mu)
	go m.dispatch() // ended by close, which waits for it
	return m
}

// put queues a call. A droppable call is dropped if too many wait.
func (m *mailbox) put(droppable bool, call func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if droppable && len(m.waiting) >= maxWaiting {
		return
	}
	m.waiting = append(m.waiting, call)
	m.wake.Signal()
}

func (m *mailbox) dispatch() {
	defer close(m.done)
	for {
		m.mu.Lock()
		for len(m.waiting) == 0 && !m.closed {
			m.wake.Wait()
		}
		batch := m.waiting
		m.waiting = nil
		m.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		for _, call := range batch {
			call()
		}
	}
}

// close waits for the queued calls.
func (m *mailbox) close() {
	m.mu.Lock()
	m.closed = true
	m.wake.Signal()
	m.mu.Unlock()
	<-m.done
}
