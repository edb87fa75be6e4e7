package wire

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// maxStrangers bounds the connections that have not proved themselves, and strangersOf those
	// from one address. The ranks of a node need less than a millisecond each.
	maxStrangers = 128
	strangersOf  = 32
)

// strangers are the connections that have not proved themselves. Where there are too many, the oldest
// makes room, so that however many do nothing, a rank that comes gets its turn.
type strangers struct {
	mu   sync.Mutex
	here []stranger // guarded by mu; the oldest first
}

// stranger is a connection and where it comes from.
type stranger struct {
	conn   net.Conn
	source string
}

// admit takes a connection in, and closes another if there are too many.
func (s *strangers) admit(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	source := sourceOf(conn)
	of, oldest := 0, -1 // those of the same source
	for i, x := range s.here {
		if x.source == source {
			if of++; oldest < 0 {
				oldest = i
			}
		}
	}
	switch {
	case of >= strangersOf && source != "":
	case len(s.here) >= maxStrangers:
		oldest = 0
	default:
		oldest = -1
	}
	if oldest >= 0 {
		s.here[oldest].conn.Close()
		s.here = slices.Delete(s.here, oldest, oldest+1)
	}
	s.here = append(s.here, stranger{conn, source})
}

// forget notes that a connection has proved itself, or has ended.
func (s *strangers) forget(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.here = slices.DeleteFunc(s.here, func(x stranger) bool { return x.conn == conn })
}

// sourceOf returns the address that a connection comes from, of IPv6 the network, which one host can
// have all addresses of. It is "" for a Unix socket: only this user can reach those.
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
	freeLines = 20 // lines of a kind that are logged at once, and again after a pause
	linePause = 10 * time.Second
)

// seldom logs lines that others can cause as many of as they like.
type seldom struct {
	log func(format string, args ...any)

	mu    sync.Mutex
	since time.Time // guarded by mu; of the first of these lines
	lines int       // guarded by mu
}

// say logs a line, or counts it where there have been too many.
func (s *seldom) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); now.Sub(s.since) > linePause {
		if hidden := s.lines - freeLines; hidden > 0 {
			s.log("%d more lines like the last", hidden)
		}
		s.since, s.lines = now, 0
	}
	if s.lines++; s.lines <= freeLines {
		s.log(format, args...)
	}
}
