// Package admission limits unauthenticated connections to a server, and the log lines that they cause. A Door holds
// them until they authenticate or another connection takes their place:
//
//	door := admission.New(admission.Limits{Most: 64, Stay: 250 * time.Millisecond})
//	go door.Serve(listener, greet, refused) // greet calls door.Leave after the peer has authenticated
//	defer door.Close()
package admission

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// acceptPause follows a failed accept, which fails for example without free file descriptors.
const acceptPause = 50 * time.Millisecond

// Limits are the limits of a Door.
type Limits struct {
	Most int // connections at once
	Each int // connections at once from one address, or one IPv6 network; 0: no limit
	// Stay is the time for which a connection keeps its place while others wait in the system's queue. After that, the
	// next connection replaces the oldest, so that silent connections do not block the others.
	Stay time.Duration
}

// Door holds the unauthenticated connections.
type Door struct {
	limits Limits
	left   chan struct{} // gets a value after a connection has left
	done   chan struct{} // closed by Close

	mu      sync.Mutex
	closed  bool      // guarded by mu
	pending []pending // guarded by mu; oldest first
}

type pending struct {
	conn   net.Conn
	source string
	since  time.Time
}

// New returns a door without connections.
func New(limits Limits) *Door {
	return &Door{limits: limits, left: make(chan struct{}, 1), done: make(chan struct{})}
}

// Serve accepts connections until ln or the door is closed, and returns after the last greet. It calls greet for each
// connection, on a new goroutine, and then Leave. failed gets errors of ln.
func (d *Door) Serve(ln net.Listener, greet func(conn net.Conn), failed func(err error)) {
	var greeting sync.WaitGroup
	defer greeting.Wait()
	for {
		conn, err := ln.Accept()
		switch {
		case err == nil:
			if d.Enter(conn) {
				greeting.Go(func() {
					defer d.Leave(conn)
					greet(conn)
				})
			}
			continue
		case errors.Is(err, net.ErrClosed):
			return
		}
		select {
		case <-d.done:
			return
		case <-time.After(acceptPause):
			failed(err)
		}
	}
}

// Enter waits for a place for conn. After Close it closes conn and returns false.
func (d *Door) Enter(conn net.Conn) bool {
	for {
		wait, ok := d.take(conn)
		if ok {
			return true
		}
		select {
		case <-d.done:
			conn.Close()
			return false
		case <-d.left:
		case <-time.After(wait):
		}
	}
}

// take gives conn a place, if necessary that of an older connection. Otherwise it returns the oldest's remaining time.
func (d *Door) take(conn net.Conn) (wait time.Duration, ok bool) {
	source := ""
	if d.limits.Each > 0 {
		source = sourceOf(conn)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0, false
	}
	if len(d.pending) >= d.limits.Most {
		if wait := d.limits.Stay - time.Since(d.pending[0].since); wait > 0 {
			return wait, false
		}
	}
	same, oldest := 0, 0 // connections of the same source
	for i := len(d.pending) - 1; i >= 0; i-- {
		if d.pending[i].source == source {
			same, oldest = same+1, i
		}
	}
	switch {
	case source != "" && same >= d.limits.Each:
		d.end(oldest)
	case len(d.pending) >= d.limits.Most:
		d.end(0)
	}
	d.pending = append(d.pending, pending{conn, source, time.Now()})
	return 0, true
}

// end closes a connection and frees its place. The caller holds d.mu.
func (d *Door) end(i int) {
	d.pending[i].conn.Close()
	d.pending = slices.Delete(d.pending, i, i+1)
}

// Leave frees the place of conn, which has authenticated or ended. It returns false if conn has lost its place.
func (d *Door) Leave(conn net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.pending, func(p pending) bool { return p.conn == conn })
	if i < 0 {
		return false
	}
	d.pending = slices.Delete(d.pending, i, i+1)
	select {
	case d.left <- struct{}{}:
	default:
	}
	return true
}

// Close closes all connections that have a place, and later ones.
func (d *Door) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	d.closed = true
	close(d.done)
	for len(d.pending) > 0 {
		d.end(0)
	}
}

// sourceOf returns the remote address of a connection. For IPv6 it returns the network, since one host can have all of
// its addresses. For a Unix socket, which only this user can reach, it returns "".
func sourceOf(conn net.Conn) string {
	a, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil {
		return ""
	}
	bits, ip := 64, a.Addr().Unmap()
	if ip.Is4() {
		bits = 32
	}
	network, err := ip.Prefix(bits)
	if err != nil {
		return ip.String()
	}
	return network.String()
}

const (
	freeLines = 20 // lines in each period of linePause
	linePause = 10 * time.Second
)

// Log limits the rate of log lines from unauthenticated connections.
type Log struct {
	print func(format string, args ...any)

	mu    sync.Mutex
	since time.Time // guarded by mu; time of the first line
	lines int       // guarded by mu
}

// NewLog returns a log that passes lines to print.
func NewLog(print func(format string, args ...any)) *Log { return &Log{print: print} }

// Printf logs a line. After too many, it only counts them.
func (l *Log) Printf(format string, args ...any) {
	l.mu.Lock()
	now, hidden := time.Now(), 0
	if now.Sub(l.since) > linePause {
		hidden = max(0, l.lines-freeLines)
		l.since, l.lines = now, 0
	}
	l.lines++
	free := l.lines <= freeLines
	l.mu.Unlock()
	if hidden > 0 {
		l.print("%d more lines were left out", hidden)
	}
	if free {
		l.print(format, args...)
	}
}
