package wire

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

const (
	// maxStrangers is how many connections may be in their handshake at once. One more ends the oldest,
	// so that those that say nothing keep nobody out.
	maxStrangers = 64
	// stay is how long a connection has for its handshake in any case: a thousand agents may come in a
	// moment, and wait in the system's queue for their turn.
	stay = 250 * time.Millisecond
)

// stranger is a connection in its handshake.
type stranger struct {
	net.Conn
	since time.Time
}

// Door takes the connections of other agents.
type Door struct {
	ln     net.Listener
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu     sync.Mutex
	queue  []stranger    // in their handshake, the oldest first; guarded by mu
	closed bool          // guarded by mu
	free   chan struct{} // has a value when one has left; room for one
}

// Open lets agents in: up gets the links of those that are welcome, refused the others' errors. Both are
// called from several goroutines.
func Open(ln net.Listener, p *Party, up func(*Link), refused func(error)) *Door {
	ctx, cancel := context.WithCancel(context.Background())
	d := &Door{ln: ln, cancel: cancel, free: make(chan struct{}, 1)}
	d.group.Add(1)
	go d.accept(ctx, p, up, refused)
	return d
}

func (d *Door) accept(ctx context.Context, p *Party, up func(*Link), refused func(error)) {
	defer d.group.Done()
	for {
		conn, err := d.ln.Accept()
		if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
			return
		}
		if err != nil { // no descriptors, most likely
			refused(err)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		if !d.enter(ctx, conn) {
			return
		}
		go func() { // greet
			defer d.group.Done()
			l, err := Accept(ctx, conn, p)
			known := d.leave(conn)
			switch {
			case err == nil:
				up(l)
			case known: // and not pushed out by others
				refused(err)
			}
		}()
	}
}

// enter notes a connection in its handshake. If there are too many it waits for one to end, and ends the
// oldest when that has had its time.
func (d *Door) enter(ctx context.Context, conn net.Conn) bool {
	for {
		wait, ok := d.try(conn)
		if wait == 0 {
			return ok
		}
		t := time.NewTimer(wait)
		select {
		case <-d.free:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// try notes the connection if there is room, or says how long there may be none.
func (d *Door) try(conn net.Conn) (wait time.Duration, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		conn.Close()
		return 0, false
	}
	if len(d.queue) == maxStrangers {
		if wait = stay - time.Since(d.queue[0].since); wait > 0 {
			return wait, false
		}
		d.queue[0].Close()
		d.queue = d.queue[1:]
	}
	d.queue = append(d.queue, stranger{conn, time.Now()})
	d.group.Add(1)
	return 0, true
}

// leave forgets a connection, and reports whether it was known.
func (d *Door) leave(conn net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, c := range d.queue {
		if c.Conn == conn {
			d.queue = append(d.queue[:i:i], d.queue[i+1:]...)
			select {
			case d.free <- struct{}{}:
			default:
			}
			return true
		}
	}
	return false
}

// Close closes the listener, and waits until nothing of the door runs.
func (d *Door) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.cancel()
	err := d.ln.Close()
	d.group.Wait()
	return err
}
