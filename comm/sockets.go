package comm

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// sockets is the transport between processes: a full mesh of connections.
type sockets struct {
	rank, size int

	mu     sync.Mutex
	peers  []*peer // guarded by mu until complete; nil for the own rank
	taken  []bool  // guarded by mu; ranks whose connection is made or being made
	names  []string
	cause  error // guarded by mu; as this rank reports it
	closed bool  // guarded by mu

	stood []atomic.Int32 // 1 + whom each rank stands waiting for, or 0

	complete chan struct{} // closed when all peers are there
	dead     chan struct{} // closed at the first failure, or at close
	told     chan struct{} // closed when the peers know, and no transfer is left
}

func newSockets(rank, size int, name string) *sockets {
	s := &sockets{
		rank: rank, size: size, peers: make([]*peer, size), taken: make([]bool, size), names: make([]string, size),
		stood:    make([]atomic.Int32, size),
		complete: make(chan struct{}), dead: make(chan struct{}), told: make(chan struct{}),
	}
	s.names[rank], s.taken[rank] = name, true
	if size == 1 {
		close(s.complete)
	}
	return s
}

func (s *sockets) peerName(rank int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return rankName(rank, s.names[rank])
}

func (s *sockets) err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause == nil && s.closed {
		return ErrClosed
	}
	return s.cause
}

// post needs no lock for peers: groups are made when the mesh is complete.
func (s *sockets) post(t *transfer) { s.peers[t.peer].post(t) }

// reserve takes a rank's place for one connection; release gives it back.
func (s *sockets) reserve(rank int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[rank] {
		return false
	}
	s.taken[rank] = true
	return true
}

func (s *sockets) release(rank int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken[rank] = false
}

// attach starts to serve the connection of a reserved rank. From here on its end is noticed,
// also while other ranks are still to come.
func (s *sockets) attach(p *peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil || s.closed {
		s.dismiss(p)
		return
	}
	s.peers[p.rank], s.names[p.rank] = p, p.name
	p.name = rankName(p.rank, p.name)
	go p.readLoop()  // both end after p.end, which fail and close call; windDown waits
	go p.writeLoop() // for them to let go of transfers
	for r, q := range s.peers {
		if q == nil && r != s.rank {
			return
		}
	}
	close(s.complete)
}

// dismiss tells a peer that came after the failure what it was. s.mu is held; a peer that
// has just proved itself has room for this one frame.
func (s *sockets) dismiss(p *peer) {
	if s.cause != nil {
		note := s.note()
		p.conn.SetWriteDeadline(time.Now().Add(endBound))
		p.out.add(header{kind: frameAbort, length: len(note)}, note)
		// Nothing more can be done for it: at worst it takes this rank for lost.
		_ = p.out.flush()
	}
	p.conn.Close()
}

// note is the failure as the other ranks are told it. s.mu is held.
func (s *sockets) note() []byte {
	return encodeNote(peerForm(s.rank, rankName(s.rank, s.names[s.rank]), s.cause))
}

// missing lists the ranks that have no connection.
func (s *sockets) missing() (ranks []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, p := range s.peers {
		if p == nil && r != s.rank {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (s *sockets) fail(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil || s.closed {
		return
	}
	s.cause = ownForm(cause)
	close(s.dead)
	note := s.note()
	// It ends within twice endBound, and flush and close wait for it.
	go s.windDown(header{kind: frameAbort, length: len(note)}, note)
}

// windDown tells the peers, and only then this rank's callers: what they do next may be to
// exit, and a connection that ends without a word is taken for a death.
func (s *sockets) windDown(last header, note []byte) {
	s.mu.Lock()
	peers := make([]*peer, 0, s.size)
	for _, p := range s.peers {
		if p != nil {
			peers = append(peers, p)
		}
	}
	s.mu.Unlock()
	for _, p := range peers {
		p.end(last, note)
	}
	for _, p := range peers {
		p.quiet.Wait()
	}
	err := s.err()
	for _, p := range peers {
		for _, t := range p.abandon() {
			t.finish(err)
		}
	}
	close(s.told)
}

func (s *sockets) flush() {
	select {
	case <-s.dead:
		<-s.told
	default:
	}
}

func (s *sockets) ranks() int              { return s.size }
func (s *sockets) standsOn(rank int) int   { return int(s.stood[rank].Load()) - 1 }
func (s *sockets) failed() <-chan struct{} { return s.dead }

func (s *sockets) hasLeft(rank int) bool {
	if rank == s.rank {
		return false
	}
	p := s.peers[rank]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.left
}

func (s *sockets) stand(peer int) {
	s.stood[s.rank].Store(int32(peer + 1))
	for _, p := range s.peers {
		if p != nil {
			p.mu.Lock()
			p.control(header{kind: frameStand, size: uint64(peer + 1)})
			p.mu.Unlock()
		}
	}
}

func (s *sockets) forget(group uint64) {
	for _, p := range s.peers {
		if p != nil {
			p.mu.Lock()
			delete(p.flows, group)
			p.mu.Unlock()
		}
	}
}

func (s *sockets) close() error {
	s.mu.Lock()
	first := s.cause == nil && !s.closed
	s.closed = true
	if first {
		close(s.dead)
	}
	s.mu.Unlock()
	if first {
		s.windDown(header{kind: frameGoodbye}, nil)
	}
	<-s.told
	return nil
}

// verdict is what the end of a connection means.
func (p *peer) verdict(err error) error {
	var pe *PeerError
	switch {
	case errors.As(err, &pe):
		return err
	case errors.Is(err, ErrProtocol):
		return p.blame("", err)
	}
	p.mu.Lock()
	op := p.expecting()
	p.mu.Unlock()
	return p.blame(op, ErrPeerLost)
}
