package wire

import "github.com/cprun/cprun/comm/internal/blame"

// What ranks say of themselves, on its way through the neighbours.

func (s *sockets) HasLeft(rank int) bool {
	if p := s.peers[rank].Load(); p != nil && p.met.Load() { // its own word comes behind its messages
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

// learn takes what a rank has said, which from has told. In a small world that rank tells all itself.
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

// spread tells those near what a rank has said last, but for the one that has told it.
func (s *sockets) spread(rank int, from *peer) {
	for _, r := range s.near {
		if p := s.peers[r].Load(); p != from && r != rank {
			p.tell(rank)
		}
	}
}
