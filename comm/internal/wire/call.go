package wire

import (
	"fmt"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// Of two ranks the higher one dials. A lower one that needs a connection calls the higher, from rank
// to rank: each passes the call on to the one of its own connections that is nearest to the called
// rank without going past it. The neighbours at distances of powers of two halve the way with
// each step, so log2 N steps do.
//
// Two calls go out at once, one up through the ranks between the two, and one down around the
// others. No rank is on both ways, so that one which stands still holds up no call. Who calls
// does so again from time to time, since a rank on the way may have left with the call.

// The ways of a call, which is the size of its frame.
const (
	callUp   = 1
	callDown = 2
)

// maxCalls bounds the calls that wait to be passed on to one rank. More are dropped: whoever
// needs the connection calls again.
const maxCalls = 4096

// call asks a higher rank to dial this one.
func (s *sockets) call(rank int) {
	for way := range uint64(2) {
		s.pass(header{kind: frameCall, id: link.MsgID{Group: uint64(s.rank), Seq: uint64(rank)}, size: callUp + way})
	}
}

// onCall takes a call, and answers it or passes it on.
func (s *sockets) onCall(h header) error {
	from, to := int(h.id.Group), int(h.id.Seq)
	switch {
	case to >= s.size: // and so is from, which is below it
		return fmt.Errorf("%w: it passes on a call to rank %d of %d", blame.ErrProtocol, to, s.size)
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
