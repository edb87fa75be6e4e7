package key

import (
	"net"
	"net/netip"
	"slices"
	"sync"
)

// Bounds of a server's connections. A node asks once for each of its tasks.
const (
	maxConns  = 128
	perSource = 32
)

// A slot is that of one connection.
type slot struct {
	conn   net.Conn
	source netip.Addr
	heard  bool // its message came whole
}

// slots holds the connections of a server. Somebody who opens many and says nothing keeps nobody out: the
// oldest that was not heard makes way.
type slots struct {
	mu   sync.Mutex
	list []*slot // in the order of arrival
}

// add takes a connection in, and returns nil where its source has enough.
func (s *slots) add(c net.Conn) *slot {
	n := &slot{conn: c}
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		n.source = a.AddrPort().Addr().Unmap()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	same := 0
	for _, o := range s.list {
		if o.source == n.source {
			same++
		}
	}
	switch {
	case same >= perSource:
		if !s.evict(func(o *slot) bool { return o.source == n.source }) {
			return nil
		}
	case len(s.list) >= maxConns:
		if !s.evict(func(*slot) bool { return true }) {
			return nil
		}
	}
	s.list = append(s.list, n)
	return n
}

// evict closes the oldest connection of some that was not heard. mu is held.
func (s *slots) evict(of func(*slot) bool) bool {
	i := slices.IndexFunc(s.list, func(o *slot) bool { return !o.heard && of(o) })
	if i < 0 {
		return false
	}
	s.list[i].conn.Close()
	s.list = slices.Delete(s.list, i, i+1)
	return true
}

// hear marks a connection whose message came whole.
func (s *slots) hear(n *slot) {
	s.mu.Lock()
	n.heard = true
	s.mu.Unlock()
}

// remove closes a connection, and forgets it.
func (s *slots) remove(n *slot) {
	n.conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.list, n); i >= 0 {
		s.list = slices.Delete(s.list, i, i+1)
	}
}

// closeAll closes all.
func (s *slots) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.list {
		n.conn.Close()
	}
}
