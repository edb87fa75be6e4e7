// Package admission bounds the cost of strangers: connections that have not proven who they are, and the log lines
// that they cause.
//
//	door := admission.New(admission.Limits{Most: 64, Stay: 250 * time.Millisecond})
//	go door.Serve(listener, greet, refused) // greet calls door.Leave when the peer has proven itself
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

// acceptPause follows an accept that failed, as it does without file descriptors.
const acceptPause = 50 * time.Millisecond

// Limits bound the strangers of a Door.
type Limits struct {
	Most int // connections at once
	Each int // of them from one address, or one network of IPv6; 0: any
	// Stay is how long a connection keeps its place when others wait for it, in the system's queue. After that
	// the next comer ends the oldest, so that silent connections keep no one out.
	Stay time.Duration
}

// Door holds the connections that have not proven themselves.
type Door struct {
	limits Limits
	room   chan struct{} // gets a value after a connection has left
	done   chan struct{} // closed by Close

	mu     sync.Mutex
	closed bool       // guarded by mu
	here   []stranger // guarded by mu; the oldest first
}

type stranger struct {
	conn   net.Conn
	source string
	since  time.Time
}

// New returns a door without connections.
func New(limits Limits) *Door {
	return &Door{limits: limits, room: make(chan struct{}, 1), done: make(chan struct{})}
}

// Serve accepts connections until ln or the door is closed, and returns after the last greet. It calls greet for
// each connection, on a goroutine of its own, and takes back its place afterwards. failed gets errors of ln.
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
		case <-d.room:
		case <-time.After(wait):
		}
	}
}

// take gives conn a place, that of an older connection if need be. Otherwise it returns how long the oldest may stay.
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
	if len(d.here) >= d.limits.Most {
		if wait := d.limits.Stay - time.Since(d.here[0].since); wait > 0 {
			return wait, false
		}
	}
	of, oldest := 0, 0 // those of the same source
	for i := len(d.here) - 1; i >= 0; i-- {
		if d.here[i].source == source {
			of, oldest = of+1, i
		}
	}
	switch {
	case source != "" && of >= d.limits.Each:
		d.end(oldest)
	case len(d.here) >= d.limits.Most:
		d.end(0)
	}
	d.here = append(d.here, stranger{conn, source, time.Now()})
	return 0, true
}

// end closes a connection and frees its place. d.mu is held.
func (d *Door) end(i int) {
	d.here[i].conn.Close()
	d.here = slices.Delete(d.here, i, i+1)
}

// Leave frees the place of conn, which has proven itself or ended. It returns false if conn had none any more.
func (d *Door) Leave(conn net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.here, func(s stranger) bool { return s.conn == conn })
	if i < 0 {
		return false
	}
	d.here = slices.Delete(d.here, i, i+1)
	select {
	case d.room <- struct{}{}:
	default:
	}
	return true
}

// Close ends all connections that have a place, and lets none in any more.
func (d *Door) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	d.closed = true
	close(d.done)
	for len(d.here) > 0 {
		d.end(0)
	}
}

// sourceOf returns the address of a connection's other end, or for IPv6 the network, since one host can have all
// addresses of it. It is "" for a Unix socket, which only this user can reach.
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
	freeLines = 20 // lines that are logged at once, and again after a pause
	linePause = 10 * time.Second
)

// Log limits the rate of lines that strangers cause.
type Log struct {
	print func(format string, args ...any)

	mu    sync.Mutex
	since time.Time // guarded by mu; of the first of these lines
	lines int       // guarded by mu
}

// NewLog returns a log that passes lines to print.
func NewLog(print func(format string, args ...any)) *Log { return &Log{print: print} }

// Printf logs a line, or counts it after too many.
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
