package wire

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// A sockets value is the transport between processes. In a small world all ranks are connected at the start; in a large
// one each connects with its neighbours then, and with others on first use.
//
// The end of the world travels through the neighbours without numbers. The last frame of every connection is an abort,
// with the rank to blame and the cause, or a goodbye, and a rank that gets an abort ends with that cause itself. So it
// reaches all ranks, once by every connection, and always before the ends of connections that it causes.
type sockets struct {
	rank, size int
	few        bool
	roster     *roster
	near       []int   // the ranks to connect to at the start
	meets      *mesher // makes connections; nil if they are made by hand

	mu     sync.Mutex
	coming int   // guarded by mu; how many of near are not yet connected
	cause  error // guarded by mu; as this rank reports it
	closed bool  // guarded by mu

	peers []atomic.Pointer[peer] // set under mu, on first use

	// committed counts the handshakes whose other side expects a last frame.
	committed sync.WaitGroup // added to with mu held, while the world has not ended

	watched  bool           // guarded by mu; watch runs
	watching sync.WaitGroup // added to with mu held, while the world has not ended

	complete chan struct{} // closed when those near are there
	dead     chan struct{} // closed at the first failure, or at close
	notified chan struct{} // closed when the peers are informed, and no transfer is left
}

// newSockets returns the transport of a rank without connections. In worlds of up to pairs ranks all are neighbours.
func newSockets(rank, size int, name string, pairs int) *sockets {
	s := &sockets{
		rank: rank, size: size, few: size > pairs, roster: newRoster(rank, size, name),
		peers:    make([]atomic.Pointer[peer], size),
		complete: make(chan struct{}), dead: make(chan struct{}), notified: make(chan struct{}),
	}
	add := func(r int) {
		s.near = append(s.near, r)
		s.peer(r).near = true
	}
	if s.few {
		link.Neighbours(rank, size, add)
	} else {
		for r := range size {
			if r != rank {
				add(r)
			}
		}
	}
	if s.coming = len(s.near); s.coming == 0 {
		close(s.complete)
	}
	return s
}

func (s *sockets) PeerName(rank int) string { return blame.RankName(rank, s.roster.name(rank)) }

func (s *sockets) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause == nil && s.closed {
		return blame.ErrClosed
	}
	return s.cause
}

// peer returns the peer of a rank, and makes it if needed.
func (s *sockets) peer(rank int) *peer {
	if p := s.peers[rank].Load(); p != nil {
		return p
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.peers[rank].Load()
	if p == nil {
		p = newPeer(s, rank)
		// Either this sees the departure of the rank, or the goroutine that learns of it sees the peer.
		p.left, p.ending = s.roster.hasLeft(rank), s.cause != nil || s.closed
		s.peers[rank].Store(p)
	}
	return p
}

func (s *sockets) all(f func(p *peer)) {
	for i := range s.peers {
		if p := s.peers[i].Load(); p != nil {
			f(p)
		}
	}
}

func (s *sockets) Post(t *link.Transfer) {
	p := s.peer(t.Peer)
	p.post(t)
	if !p.met.Load() {
		s.want(p)
	}
}

// want starts to connect with a peer, unless that is under way.
func (s *sockets) want(p *peer) {
	if s.meets == nil || p.wanted.Swap(true) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause == nil && !s.closed {
		s.meets.wg.Go(func() { s.meets.seek(p) })
	}
}

// commit records that the other side of a handshake will rely on a last frame of this one; the caller calls
// committed.Done after it. It returns false after the end of the world.
func (s *sockets) commit() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil || s.closed {
		return false
	}
	s.committed.Add(1)
	return true
}

// attach starts to serve a connection of a reserved peer. From here its end is noticed, also while other ranks have
// still to connect.
func (s *sockets) attach(c *channel) {
	s.roster.introduce(c.rank, c.name)
	p := s.peer(c.rank)
	p.mu.Lock()
	s.mu.Lock()
	last, note, over := s.lastFrame()
	if !over {
		p.serve(c)
		if c.raw != nil && !s.watched {
			s.watched = true
			s.watching.Go(s.watch) // ends with the world; Close waits for it
		}
		if p.near {
			if s.coming--; s.coming == 0 {
				close(s.complete)
			}
		}
	}
	s.mu.Unlock()
	p.mu.Unlock()
	if over {
		s.dismiss(c, last, note)
	}
}

// dismiss sends the world's last frame to a rank that arrives after the end.
func (s *sockets) dismiss(c *channel, last header, note []byte) {
	p := newPeer(s, c.rank)
	p.mu.Lock()
	p.serve(c)
	p.mu.Unlock()
	p.end(last, note)
	p.quiet.Wait() // twice endBound at most
}

// lastFrame returns the frame for the other ranks at the end, and whether the end has come. s.mu is held.
func (s *sockets) lastFrame() (last header, note []byte, over bool) {
	if s.cause == nil {
		return header{kind: frameGoodbye}, nil, s.closed
	}
	note = encodeNote(blame.PeerForm(s.rank, s.PeerName(s.rank), s.cause))
	return header{kind: frameAbort, length: len(note)}, note, true
}

// missing lists the ranks that should be connected at the start and are not.
func (s *sockets) missing() (ranks []int) {
	for _, r := range s.near {
		if !s.peer(r).met.Load() {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (s *sockets) Fail(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil || s.closed {
		return
	}
	s.cause = blame.OwnForm(cause)
	close(s.dead)
	go s.windDown() // ends within twice endBound; AwaitNotified and Close wait for it
}

// windDown informs the peers first and then this rank's callers, who may exit at once: a connection that ends without a
// last frame counts as a death.
func (s *sockets) windDown() {
	s.mu.Lock()
	last, note, _ := s.lastFrame()
	s.mu.Unlock()
	s.all(func(p *peer) { p.end(last, note) })
	s.all(func(p *peer) { p.quiet.Wait() })
	s.committed.Wait() // handshakes under way end with dismiss
	err := s.Err()
	s.all(func(p *peer) {
		for _, t := range p.abandon() {
			t.Finish(err)
		}
	})
	close(s.notified)
}

func (s *sockets) AwaitNotified() {
	select {
	case <-s.dead:
		<-s.notified
	default:
	}
}

func (s *sockets) Ranks() int              { return s.size }
func (s *sockets) WaitsFor(rank int) int   { return s.roster.waitsFor(rank) }
func (s *sockets) Failed() <-chan struct{} { return s.dead }

func (s *sockets) Unreached(rank int) error {
	p := s.peers[rank].Load()
	if p == nil || p.met.Load() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.why
}

func (s *sockets) Forget(group uint64) {
	s.all(func(p *peer) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.forget(group)
	})
}

func (s *sockets) Close() error {
	s.mu.Lock()
	first := s.cause == nil && !s.closed
	s.closed = true
	if first {
		close(s.dead)
	}
	s.mu.Unlock()
	if first {
		s.windDown()
	}
	<-s.notified
	s.watching.Wait()
	if s.meets != nil {
		s.meets.close()
	}
	return nil
}

// watch checks all TCP connections for silence until the world ends.
func (s *sockets) watch() {
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

// The states of ranks, which travel through the neighbours.

func (s *sockets) HasLeft(rank int) bool {
	if p := s.peers[rank].Load(); p != nil && p.met.Load() { // its goodbye follows its messages
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.left
	}
	return s.roster.hasLeft(rank)
}

func (s *sockets) Alarm() *blame.Alarm { return &s.roster.alarm }

func (s *sockets) AnnounceWait(who any, peer int) {
	if s.roster.say(who, peer) {
		s.spread(s.rank, nil)
	}
}

// learn records a rank's state from a peer. In a large world it passes the state on; in a small one the rank itself
// informs all.
func (s *sockets) learn(rank int, said state, name string, from *peer) {
	if !s.roster.learn(rank, said, name) {
		return
	}
	if s.few {
		s.spread(rank, from)
	}
	if said.seq != lastWord || rank == from.rank {
		return
	}
	s.mu.Lock() // see peer
	p := s.peers[rank].Load()
	s.mu.Unlock()
	if p != nil {
		p.departed()
	}
}

// spread sends the latest state of a rank to all neighbours except its source.
func (s *sockets) spread(rank int, from *peer) {
	for _, r := range s.near {
		if p := s.peers[r].Load(); p != from && r != rank {
			p.addNewsOf(rank)
		}
	}
}

// Of two ranks the higher one dials. A lower one that needs a connection calls the higher, from rank to rank: each
// passes the call to its connected rank that is nearest to the called one without going past it. The neighbours at
// distances of powers of two halve the distance with each step, so log2 N steps suffice.
//
// Two calls go out at once, one up through the ranks between the two, and one down around the others. No rank is on
// both routes, so that one stopped rank cannot block a call. The caller repeats the call, since a rank on the route may
// have left with it.

// The routes of a call, the size of its frame.
const (
	callUp   = 1
	callDown = 2
)

// maxCalls bounds the queued calls for one rank. Others are dropped: the caller repeats them.
const maxCalls = 4096

func (s *sockets) call(rank int) {
	for way := range uint64(2) {
		s.pass(header{kind: frameCall, id: link.MsgID{Group: uint64(s.rank), Seq: uint64(rank)}, size: callUp + way})
	}
}

// onCall answers a call or passes it on.
func (s *sockets) onCall(h header) error {
	from, to := int(h.id.Group), int(h.id.Seq)
	switch {
	case to >= s.size: // and so is from, which is below it
		return fmt.Errorf("%w: a call to rank %d of %d", blame.ErrProtocol, to, s.size)
	case to == s.rank:
		if p := s.peer(from); !p.met.Load() {
			s.want(p)
		}
	default:
		s.pass(h)
	}
	return nil
}

// pass sends a call one step further, if there is a way.
func (s *sockets) pass(h header) {
	to := int(h.id.Seq)
	away := func(rank int) int { // how far a rank is from the called one
		if h.size == callUp {
			return (to - rank + s.size) % s.size
		}
		return (rank - to + s.size) % s.size
	}
	var next *peer
	least := away(s.rank)
	for r := range s.peers {
		if p := s.peers[r].Load(); p != nil && p.met.Load() && away(r) < least && !s.roster.hasLeft(r) {
			next, least = p, away(r)
		}
	}
	if next == nil {
		return
	}
	next.mu.Lock()
	defer next.mu.Unlock()
	if len(next.ctrl) < maxCalls {
		next.control(h)
	}
}
