package wire

import "github.com/cprun/cprun/comm/internal/blame"

// What becomes of a peer before there is a connection with it.

// reserve takes the place of the connection with the peer for one that is being made, and reports whether
// it was free. free gives it back.
func (p *peer) reserve() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.channel != nil || p.meeting {
		return false
	}
	p.meeting = true
	return true
}

// free gives the place back, and says why no connection was made.
func (p *peer) free(why error) {
	p.mu.Lock()
	p.meeting = false
	p.mu.Unlock()
	p.unreached(why)
	p.departed()
}

// unreached notes why there is no connection.
func (p *peer) unreached(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.met.Load() {
		p.why = why
	}
}

// departed ends what is expected of a peer that has left by word of others. Where there is a
// connection, or is about to be, the peer's own word will come on it, behind all that it has sent.
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

// leave notes that the peer has left, which is in order as long as nothing is expected of it. p.mu is
// held.
func (p *peer) leave() error {
	p.left = true
	if op := p.expecting(); op != "" {
		return p.blame(op, blame.ErrPeerLeft)
	}
	return nil
}
