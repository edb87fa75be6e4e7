package wire

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
)

// A lost network sends no message about it. So both ends of a TCP connection send keepalive probes in every idle
// second, and this rank counts the segments that its system receives: data, acknowledgements, probes,
// retransmissions. If the count does not change for silenceBound, the other host or the path from it is gone.
//
// TCP_USER_TIMEOUT alone would be wrong. It also ends a connection if the other process does not read, because it
// is stopped or starved, although its host answers: the deadline judges that, since it has the pending
// transfers. And it measures acknowledgements in order, which a bad network may delay for seconds. So it is
// set to patience while the world lasts, and so is the number of retransmissions.

const (
	silenceBound = 7 * time.Second
	lookPause    = 250 * time.Millisecond

	// askAfter is the idle time before a keepalive probe, and between probes. After askNumber probes the system
	// gives up by itself, long after this rank.
	askAfter  = time.Second
	askNumber = 60

	// resendBound is the longest pause between retransmissions on Linux 6.15 and later; older systems double
	// the pauses.
	resendBound = time.Second

	// patience is how long a system retransmits: in effect, until this rank gives up. keptAtEnd bounds the
	// retransmission of the last bytes, after the rank has closed the connection.
	patience  = 24 * time.Hour
	keptAtEnd = 10 * time.Second
)

// tune prepares a TCP connection for silent, and returns its raw connection, or nil for other connections.
func tune(conn net.Conn) syscall.RawConn {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := c.SyscallConn()
	if err != nil { // closed, as its reader will find
		return nil
	}
	_ = c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: askAfter, Interval: askAfter, Count: askNumber})
	keepSending(raw, patience)
	sendOften(raw)
	return raw
}

// hurry bounds the system's retransmissions after this rank has closed a connection.
func (c *channel) hurry() {
	if c.raw != nil {
		keepSending(c.raw, keptAtEnd)
	}
}

// hearing records when the other end of a connection was last heard.
type hearing struct {
	count uint32 // of segments
	at    time.Time
}

// heard records the count of segments at a time, and returns for how long the count has not changed.
func (h *hearing) heard(count uint32, now time.Time) time.Duration {
	if h.at.IsZero() || h.count != count {
		h.count, h.at = count, now
	}
	return now.Sub(h.at)
}

// silence is the error of a connection on which a rank hears nothing. The peer may receive the error and pass it
// on, so it names the rank that noticed.
type silence struct {
	rank  int
	from  string
	since time.Time
}

func (s *silence) Error() string {
	return fmt.Sprintf("rank %d hears nothing from %s since %s, for %v: %v", s.rank, s.from,
		s.since.Format("15:04:05.0"), silenceBound, blame.ErrPeerLost)
}
func (s *silence) Unwrap() error { return blame.ErrPeerLost }

// watch checks all TCP connections for silence until the world ends.
func (s *sockets) watch() {
	defer s.watching.Done()
	tick := time.NewTicker(lookPause)
	defer tick.Stop()
	for {
		select {
		case <-s.dead:
			return
		case now := <-tick.C:
			s.all(func(p *peer) {
				if err := p.silent(now); err != nil {
					s.Fail(err)
				}
			})
		}
	}
}

// reset makes Close send a reset at once. If only the path to this rank is lost, the peer so learns of the
// failure, even if it waits for room or for acknowledgements.
func (c *channel) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}

// silent returns an error if a connection with the peer is lost without a word.
func (p *peer) silent(now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.channel
	if c == nil || c.raw == nil || p.left {
		return nil
	}
	if count, ok := segments(c.raw); ok && c.hears.heard(count, now) >= silenceBound {
		c.reset()
		return p.blame(p.expecting(), &silence{p.s.rank, c.RemoteAddr().String(), c.hears.at})
	}
	return nil
}
