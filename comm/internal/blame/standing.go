package blame

import (
	"sync"
	"sync/atomic"
)

// Standing are the waits of one rank that it tells the others of. The zero value is usable.
type Standing struct {
	mu    sync.Mutex
	waits []standing // guarded by mu; the oldest first
}

// standing is whom one part of a rank waits for.
type standing struct {
	who  any
	peer int
}

// Set notes that who, a part of the rank, waits for peer, or for nobody where that is -1. It returns
// whom the rank as a whole waits for: the peer that it has waited for longest, or -1.
func (s *Standing) Set(who any, peer int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := s.waits[:0]
	for _, w := range s.waits {
		if w.who == who {
			if peer < 0 {
				continue
			}
			w.peer, peer = peer, -1
		}
		kept = append(kept, w)
	}
	if s.waits = kept; peer >= 0 {
		s.waits = append(s.waits, standing{who, peer})
	}
	if len(s.waits) == 0 {
		return -1
	}
	return s.waits[0].peer
}

// Alarm wakes those who stand waiting when another has waited up to its deadline, so that they say whom
// they wait for themselves: they may have come later, with their own deadline far ahead.
type Alarm struct {
	mu   sync.Mutex
	next chan struct{} // guarded by mu

	late atomic.Int32 // ranks that say so now
}

// Late takes that a rank has said that it waits, or waits no longer: it did before, and does now.
func (a *Alarm) Late(before, now bool) {
	if now {
		a.late.Add(1)
		a.Ring()
	}
	if before {
		a.late.Add(-1)
	}
}

// On reports whether any rank says that it is late.
func (a *Alarm) On() bool { return a.late.Load() > 0 }

// Next returns a channel that is closed when the alarm next rings.
func (a *Alarm) Next() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.next == nil {
		a.next = make(chan struct{})
	}
	return a.next
}

// Ring wakes all who have asked.
func (a *Alarm) Ring() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.next != nil {
		close(a.next)
		a.next = nil
	}
}
