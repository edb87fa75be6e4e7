package wire

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// endBound is how long a rank that ends tries to tell a peer so.
const endBound = 500 * time.Millisecond

// A peer is one rank as another deals with it: what the two owe each other, and their connection, which
// may come later. Two goroutines serve it to the end of the transport: one reads, and
// never waits for anything but the connection, and one writes. Because every rank always reads,
// every write comes to its end.
type peer struct {
	s    *sockets
	rank int
	near bool // one of those whose connections are made at the start, who pass on news

	wanted atomic.Bool   // a connection is being sought
	met    atomic.Bool   // the connection is there; set under mu
	ready  chan struct{} // closed then

	mu      sync.Mutex
	channel *channel // guarded by mu; nil where there is none yet
	meeting bool     // guarded by mu; it is being made
	why     error    // guarded by mu; why there is none yet

	work    *sync.Cond       // signals the writer
	flows   map[uint64]*flow // guarded by mu; by group
	debts   debts            // guarded by mu
	ctrl    []header         // guarded by mu; control frames go first
	news    map[int]bool     // guarded by mu; ranks of whom the peer does not know the last word
	small   []*link.Transfer // guarded by mu; eager messages that may be sent
	large   []*link.Transfer // guarded by mu; messages of which pieces may be sent, in turn
	left    bool             // guarded by mu; the peer has said goodbye
	ending  bool             // guarded by mu
	last    header           // guarded by mu; what is written at the end
	payload []byte           // guarded by mu; its payload
	until   time.Time        // guarded by mu; when to give up telling the peer

	stop  chan struct{}  // closed when ending is set
	quiet sync.WaitGroup // the goroutines that may hold a transfer
}

// newPeer returns a peer without a connection.
func newPeer(s *sockets, rank int) *peer {
	p := &peer{s: s, rank: rank, flows: map[uint64]*flow{}, ready: make(chan struct{}), stop: make(chan struct{})}
	p.work = sync.NewCond(&p.mu)
	return p
}

// serve begins to use a connection. p.mu is held.
func (p *peer) serve(c *channel) {
	p.channel, p.meeting, p.why = c, false, nil
	p.met.Store(true)
	close(p.ready)
	p.quiet.Add(2)
	go p.readLoop(c)  // both end after p.end, which fail and close call; windDown waits
	go p.writeLoop(c) // for them to let go of transfers
}

// name returns how errors name the peer.
func (p *peer) name() string { return p.s.PeerName(p.rank) }

// blame returns an error about the peer.
func (p *peer) blame(op string, cause error) *blame.PeerError {
	return &blame.PeerError{Rank: p.rank, Name: p.name(), Op: op, Cause: cause}
}

// tell has the peer hear what a rank has said last.
func (p *peer) tell(about int) {
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

// queue hands a message to the writer. p.mu is held.
func (p *peer) queue(t *link.Transfer) {
	if len(t.Buf) <= maxEager {
		p.small = append(p.small, t)
	} else {
		p.large = append(p.large, t)
	}
	p.work.Signal()
}

// end has the writer send a last frame, and both goroutines stop.
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
		c.hurry()
	}
	close(p.stop)
	p.work.Signal()
}

// abandon lists the transfers that have not ended, after quiet.
func (p *peer) abandon() (all []*link.Transfer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	listed := map[*link.Transfer]bool{} // of one that is being sent there may be several pieces on their way
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
