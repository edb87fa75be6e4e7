// Package blame attributes failures: it holds the errors of a group, as the first rank words them and as the others
// hear them, and searches for the stopped rank among many that wait for each other. Every part of comm reports through
// it.
package blame

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// The causes that callers can ask for with errors.Is.
var (
	ErrAborted  = errors.New("group aborted")
	ErrPeerLost = errors.New("connection lost")
	ErrDeadline = errors.New("no progress within the deadline")
	ErrPeerLeft = errors.New("has left the group")
	ErrMismatch = errors.New("message sizes differ")
	ErrClosed   = errors.New("group closed")
	ErrProtocol = errors.New("protocol violation")
)

// PeerError names the peer that a transfer failed on. Every other rank reports one when a rank dies.
type PeerError struct {
	Rank  int    // of the peer, in the world group
	Name  string // "rank 2 (pid 4711 on node-a)"
	Op    string // what was waiting: "receive of 4096 bytes", or "" when nothing was
	Cause error
}

// Error returns "name: op: cause", or "name: cause" where nothing was waiting.
func (e *PeerError) Error() string {
	if e.Op == "" {
		return fmt.Sprintf("%s: %v", e.Name, e.Cause)
	}
	return fmt.Sprintf("%s: %s: %v", e.Name, e.Op, e.Cause)
}

// Unwrap returns the cause.
func (e *PeerError) Unwrap() error { return e.Cause }

// IsRemote reports whether err is about another rank: its cause came from there, or is the loss
// or the silence of one.
func IsRemote(err error) bool {
	var pe *PeerError
	return errors.As(err, &pe)
}

// An abortError is how the cause given to Abort is reported by the rank that gave it.
type abortError struct{ cause error }

func (e *abortError) Error() string   { return fmt.Sprintf("%v: %v", ErrAborted, e.cause) }
func (e *abortError) Unwrap() []error { return []error{ErrAborted, e.cause} }

// OwnForm returns a cause as the rank reports it that met it: an error about a peer stays what
// it is, anything else is an abort.
func OwnForm(cause error) error {
	switch {
	case cause == nil:
		return ErrAborted
	case IsRemote(cause), errors.Is(cause, ErrAborted), errors.Is(cause, ErrClosed):
		return cause
	}
	return &abortError{cause}
}

// PeerForm returns the same cause as the other ranks report it, given the rank that met it. A
// rank that is itself a victim passes on whom it suffered from, so that the blame never moves.
func PeerForm(origin int, name string, own error) *PeerError {
	var pe *PeerError
	if errors.As(own, &pe) {
		return pe
	}
	return &PeerError{Rank: origin, Name: name, Cause: own}
}

// deadlineError says how long a transfer was allowed to stand still.
type deadlineError struct{ limit time.Duration }

func (e deadlineError) Error() string {
	return fmt.Sprintf("no progress for %v, the deadline", e.limit)
}
func (e deadlineError) Unwrap() error { return ErrDeadline }

// Deadline returns the cause of an operation that has stood still for limit.
func Deadline(limit time.Duration) error { return deadlineError{limit} }

// Mismatch returns the cause of a message of which the other end has another size, in bytes.
// send: the message is sent here and received there.
func Mismatch(send bool, other int) error {
	word := "sends"
	if send {
		word = "receives"
	}
	return fmt.Errorf("%w: it %s %d", ErrMismatch, word, other)
}

// RankName returns the name of a rank in errors; detail may be empty.
func RankName(rank int, detail string) string {
	if detail == "" {
		return fmt.Sprintf("rank %d", rank)
	}
	return fmt.Sprintf("rank %d (%s)", rank, detail)
}

// InCall names call and rank in front of an error.
func InCall(call string, rank, size int, err error) error {
	return fmt.Errorf("%s on rank %d of %d: %w", call, rank, size, err)
}

// WaitState are the waits of one rank that it tells the others of. The zero value is usable.
type WaitState struct {
	mu    sync.Mutex
	waits []wait // guarded by mu; the oldest first
}

// A wait is whom one part of a rank waits for.
type wait struct {
	who  any
	peer int
}

// Set notes that who, a part of the rank, waits for peer, or for no one where that is -1. It returns
// whom the rank as a whole waits for: the peer that it has waited for longest, or -1.
func (s *WaitState) Set(who any, peer int) int {
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
		s.waits = append(s.waits, wait{who, peer})
	}
	if len(s.waits) == 0 {
		return -1
	}
	return s.waits[0].peer
}

// Alarm wakes waiting operations when another has waited up to its deadline, so that they report their own waits: they
// may have come later, with a deadline far ahead.
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

// SecondLook extends an operation's deadline, at most to twice the deadline. Meanwhile the ranks exchange their waits,
// so that a ring blames the rank that stopped and not its neighbour. Also, a process that was stopped and continues
// sees its timers expire before it has read its sockets.
const SecondLook = time.Second

// Waits says who waits for whom among ranks from 0 to below Ranks.
type Waits interface {
	// Ranks returns how many ranks there are.
	Ranks() int
	// WaitsFor returns whom a rank waits for, or -1.
	WaitsFor(rank int) int
	// PeerName returns how errors name a rank.
	PeerName(rank int) string
}

// Op is an operation that needs peers.
type Op struct {
	What string // "receive of 4096 bytes"
	Way  string // how it names its peer: "from", "to" or "with"
}

// Message returns the Op of one message.
func Message(send bool, bytes int) Op {
	if send {
		return Op{fmt.Sprintf("send of %d bytes", bytes), "to"}
	}
	return Op{fmt.Sprintf("receive of %d bytes", bytes), "from"}
}

// On returns an error about a rank: op may be empty.
func On(w Waits, rank int, op string, cause error) *PeerError {
	return &PeerError{Rank: rank, Name: w.PeerName(rank), Op: op, Cause: cause}
}

// Last returns the other rank at the end of the chain of waits from first, or -1 for a circle, which has no end, and if
// own is that rank.
func Last(w Waits, own, first int) int {
	rank := first
	for range w.Ranks() {
		next := w.WaitsFor(rank)
		if next < 0 {
			break
		}
		rank = next
	}
	if rank == own || w.WaitsFor(rank) >= 0 {
		return -1
	}
	return rank
}

// Stalled returns the error of rank own's operation on peers that has stood still for limit. It
// names the first peer that does not wait itself. Where all do, as in a ring, it names the rank
// at the end of the chain, or the first peer where the chain has no end.
func Stalled(w Waits, own int, peers []int, op Op, limit time.Duration) *PeerError {
	for _, p := range peers {
		if w.WaitsFor(p) < 0 {
			return On(w, p, op.What, Deadline(limit))
		}
	}
	first := peers[0]
	rank := Last(w, own, first)
	if rank < 0 {
		return On(w, first, op.What, Deadline(limit))
	}
	what := fmt.Sprintf("%s %s %s, which waits itself", op.What, op.Way, w.PeerName(first))
	return On(w, rank, what, Deadline(limit))
}
