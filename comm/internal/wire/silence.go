package wire

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm/internal/blame"
)

// A network that is lost tells nobody. So the systems at both ends of a connection over TCP ask each other
// every second in which nothing else comes, and this rank counts what its system gets, whatever it is: data,
// acknowledgements, questions, the same once more. Where that count stands still, the other host or
// the way from it is gone.
//
// TCP_USER_TIMEOUT would not do. It also ends a connection whose other process does not read for so long,
// stopped or starved, though its host answers all the time: that is for the deadline to judge, which
// knows what waits. And it goes by what has been acknowledged in order, of which a bad network may bring
// nothing for seconds. So it is set out of the way while the world lasts, and with it the number of times that
// a system sends something again before it gives up.

const (
	silenceBound = 7 * time.Second
	lookPause    = 250 * time.Millisecond

	// askAfter is when a system asks whether the other is there, and how often. It gives up by itself
	// only long after this rank has.
	askAfter  = time.Second
	askNumber = 60

	// resendBound is how long a system waits at most before it sends again what was not acknowledged,
	// where it can be told (Linux 6.15); else the pauses double.
	resendBound = time.Second

	// patience is how long a system keeps at what is not acknowledged: in effect, until this rank
	// gives up. keptAtEnd is how long at what was written last, when the rank is done with it.
	patience  = 24 * time.Hour
	keptAtEnd = 10 * time.Second
)

// tune prepares a connection over TCP to be watched, and returns what it is watched by. Others need none.
func tune(conn net.Conn) syscall.RawConn {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := c.SyscallConn()
	if err != nil { // it is closed, which its reader will find
		return nil
	}
	_ = c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: askAfter, Interval: askAfter, Count: askNumber})
	set(raw, unix.TCP_USER_TIMEOUT, int(patience/time.Millisecond))
	set(raw, unix.TCP_RTO_MAX_MS, int(resendBound/time.Millisecond))
	set(raw, unix.TCP_THIN_LINEAR_TIMEOUTS, 1)
	return raw
}

// set sets an option of TCP. One that a system does not know costs time in bad networks only.
func set(raw syscall.RawConn, option, value int) {
	_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, option, value) })
}

// hurry bounds what the system does for a connection once this rank is done with it.
func (c *channel) hurry() {
	if c.raw != nil {
		set(c.raw, unix.TCP_USER_TIMEOUT, int(keptAtEnd/time.Millisecond))
	}
}

// segments returns how many segments this system has got on a connection, if that can be told.
func segments(raw syscall.RawConn) (n uint32, ok bool) {
	err := raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n, ok = info.Segs_in, true
		}
	})
	return n, ok && err == nil
}

// hearing is what is known of when the other end of a connection was last heard.
type hearing struct {
	count uint32 // of segments
	at    time.Time
}

// heard takes the count of segments at a time, and returns for how long it has not changed.
func (h *hearing) heard(count uint32, now time.Time) time.Duration {
	if h.at.IsZero() || h.count != count {
		h.count, h.at = count, now
	}
	return now.Sub(h.at)
}

// silence is the loss of a connection on which a rank hears nothing. The peer may be told of it and pass it
// on, so it says who has noticed.
type silence struct {
	rank  int
	from  string
	since time.Time
}

func (s *silence) Error() string {
	return fmt.Sprintf("rank %d hears nothing from %s since %s, for %v: %v", s.rank, s.from, s.since.Format("15:04:05.0"), silenceBound, blame.ErrPeerLost)
}
func (s *silence) Unwrap() error { return blame.ErrPeerLost }

// watch looks for silence on all connections over TCP until the world ends.
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

// reset has the connection end by a reset, which is sent at once. Where only the way to this rank is lost,
// the peer so learns of it, also if it waits for room or for what was sent before to be acknowledged.
func (c *channel) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}

// silent returns an error if a connection with the peer is lost without a word.
func (p *peer) silent(now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		if c.raw == nil || p.said>>c.number&1 != 0 {
			continue
		}
		if count, ok := segments(c.raw); ok && c.hears.heard(count, now) >= silenceBound {
			c.reset()
			return p.blame(p.expecting(), &silence{p.s.rank, c.RemoteAddr().String(), c.hears.at})
		}
	}
	return nil
}
