package wire

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// endBound limits the time for a last frame to a peer.
const endBound = 500 * time.Millisecond

// A peer is the state of another rank: the open messages, and a connection, which may come later. Two goroutines serve
// it until the transport ends: one reads, and waits for nothing but the connection, and one writes. Because every rank
// always reads, every write ends.
type peer struct {
	s    *sockets
	rank int
	near bool // connected at the start; passes on states

	wanted atomic.Bool   // a connection is being sought
	met    atomic.Bool   // the connection is there; set under mu
	ready  chan struct{} // closed then

	mu      sync.Mutex
	channel *channel // guarded by mu; nil if there is none yet
	meeting bool     // guarded by mu; it is being made
	why     error    // guarded by mu; why there is none yet

	work    *sync.Cond       // signals the writer
	flows   map[uint64]*flow // guarded by mu; by group
	debts   debts            // guarded by mu
	ctrl    []header         // guarded by mu; control frames go first
	news    map[int]bool     // guarded by mu; ranks with states to send to the peer
	small   []*link.Transfer // guarded by mu; eager messages that may be sent
	large   []*link.Transfer // guarded by mu; messages of which pieces may be sent, in turn
	left    bool             // guarded by mu; the peer has said goodbye
	ending  bool             // guarded by mu
	last    header           // guarded by mu; the last frame
	payload []byte           // guarded by mu; its payload
	until   time.Time        // guarded by mu; when to give up sending it

	stop  chan struct{}  // closed when ending is set
	quiet sync.WaitGroup // the goroutines that may hold a transfer
}

// newPeer returns a peer without a connection.
func newPeer(s *sockets, rank int) *peer {
	p := &peer{s: s, rank: rank, flows: map[uint64]*flow{}, ready: make(chan struct{}), stop: make(chan struct{})}
	p.work = sync.NewCond(&p.mu)
	return p
}

// reserve takes the peer's place for a connection that is being made, and reports whether it was free. free gives it
// back.
func (p *peer) reserve() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.channel != nil || p.meeting {
		return false
	}
	p.meeting = true
	return true
}

// free gives the place back, with the reason why no connection was made.
func (p *peer) free(why error) {
	p.mu.Lock()
	p.meeting = false
	p.mu.Unlock()
	p.unreached(why)
	p.departed()
}

func (p *peer) unreached(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.met.Load() {
		p.why = why
	}
}

// departed ends the transfers with a peer that has left according to others. If there is a connection, or is about to
// be, the peer's own goodbye will follow its messages there.
func (p *peer) departed() {
	p.mu.Lock()
	var err error
	if p.channel == nil && !p.meeting && p.s.roster.hasLeft(p.rank) {
		err = p.leave()
	}
	p.mu.Unlock()
	if err != nil {
		p.s.Fail(err)
	}
}

// serve starts to use a connection. p.mu is held.
func (p *peer) serve(c *channel) {
	p.channel, p.meeting, p.why = c, false, nil
	p.met.Store(true)
	close(p.ready)
	p.quiet.Add(2)
	go p.readLoop(c)  // both end after p.end, which fail and close call; windDown waits
	go p.writeLoop(c) // for them to let go of transfers
}

func (p *peer) name() string { return p.s.PeerName(p.rank) }

func (p *peer) blame(op string, cause error) *blame.PeerError {
	return &blame.PeerError{Rank: p.rank, Name: p.name(), Op: op, Cause: cause}
}

// leave records that the peer has left. That is an error if a transfer waits for it. p.mu is held.
func (p *peer) leave() error {
	p.left = true
	if op := p.expecting(); op != "" {
		return p.blame(op, blame.ErrPeerLeft)
	}
	return nil
}

// expecting returns the name of a transfer that waits for the peer, or "". p.mu is held.
func (p *peer) expecting() string {
	for _, f := range p.flows {
		for _, t := range f.posted {
			return t.Op().What
		}
		for _, t := range f.offered {
			return t.Op().What
		}
		for _, t := range f.waiting {
			return t.Op().What
		}
	}
	for _, t := range append(p.small[:len(p.small):len(p.small)], p.large...) {
		return t.Op().What
	}
	return ""
}

func (p *peer) addNewsOf(about int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.news == nil {
		p.news = map[int]bool{}
	}
	p.news[about] = true
	p.work.Signal()
}

// control queues a frame without payload. p.mu is held.
func (p *peer) control(h header) {
	p.ctrl = append(p.ctrl, h)
	p.work.Signal()
}

// queue passes a message to the writer. p.mu is held.
func (p *peer) queue(t *link.Transfer) {
	if len(t.Buf) <= maxEager {
		p.small = append(p.small, t)
	} else {
		p.large = append(p.large, t)
	}
	p.work.Signal()
}

// end makes the writer send a last frame, and both goroutines stop.
func (p *peer) end(last header, note []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ending {
		return
	}
	p.ending, p.last, p.payload, p.until = true, last, note, time.Now().Add(endBound)
	if c := p.channel; c != nil {
		c.SetReadDeadline(time.Now())
		c.SetWriteDeadline(p.until)
		if c.raw != nil { // the system sends again, after this rank has closed the connection
			keepSending(c.raw, keptAtEnd)
		}
	}
	close(p.stop)
	p.work.Signal()
}

// abandon returns the transfers that have not ended, after quiet.
func (p *peer) abandon() (all []*link.Transfer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	listed := map[*link.Transfer]bool{} // several pieces of one transfer may be in flight
	list := func(ts ...*link.Transfer) {
		for _, t := range ts {
			if !listed[t] {
				listed[t] = true
				all = append(all, t)
			}
		}
	}
	list(p.small...)
	list(p.large...)
	if c := p.channel; c != nil {
		list(c.current...)
		c.current = nil
	}
	for _, f := range p.flows {
		list(f.waiting...)
		for _, t := range f.offered {
			list(t)
		}
		for _, t := range f.posted {
			list(t)
		}
	}
	p.small, p.large, p.flows = nil, nil, map[uint64]*flow{}
	return all
}

// A lost network sends no message. So both ends of a TCP connection send keepalive probes in every idle second, and
// this rank counts the segments that its system receives: data, acknowledgements, probes, retransmissions. If the count
// does not change for silenceBound, the other host or the path from it is gone.
//
// TCP_USER_TIMEOUT alone would be wrong. It also ends a connection if the other process does not read, because it is
// stopped or starved, although its host answers; the deadline covers that, since it considers the pending transfers.
// And it measures acknowledgements in order, which a bad network may delay for seconds. So it is set to patience while
// the world lasts, and so is the number of retransmissions.

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

// A silence is the error of a connection without received segments. The peer may receive the error and pass it on, so
// it names the rank that noticed.
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

// reset makes Close send a reset at once. If only the path to this rank is lost, the peer thus learns of the failure,
// even if it waits for room or for acknowledgements.
func (c *channel) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}

// silent returns an error if a connection with the peer is silent for too long.
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
