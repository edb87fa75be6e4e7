// Package blame attributes failures: it holds the errors of a group, in the forms for the failing rank and for the
// others, and finds the stopped rank among many that wait for each other. All parts of comm report through it: OwnForm
// and PeerForm make an error, Stalled finds the rank to blame.
package blame

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// The causes for errors.Is.
var (
	ErrAborted  = errors.New("group aborted")
	ErrPeerLost = errors.New("connection lost")
	ErrDeadline = errors.New("no progress within the deadline")
	ErrPeerLeft = errors.New("has left the group")
	ErrMismatch = errors.New("message sizes differ")
	ErrClosed   = errors.New("group closed")
	ErrProtocol = errors.New("protocol violation")
)

// PeerError names the peer that a transfer failed on. If a rank dies, every other rank reports one.
type PeerError struct {
	Rank  int    // of the peer, in the world group
	Name  string // "rank 2 (pid 4711 on node-a)"
	Op    string // the pending operation, "receive of 4096 bytes"; "": none
	Cause error
}

// Error returns "name: op: cause", or "name: cause" without a pending operation.
func (e *PeerError) Error() string {
	if e.Op == "" {
		return fmt.Sprintf("%s: %v", e.Name, e.Cause)
	}
	return fmt.Sprintf("%s: %s: %v", e.Name, e.Op, e.Cause)
}

// Unwrap returns the cause.
func (e *PeerError) Unwrap() error { return e.Cause }

// IsRemote reports whether the cause of err is on another rank: it came from there, or is that rank's loss or silence.
func IsRemote(err error) bool {
	_, ok := errors.AsType[*PeerError](err)
	return ok
}

// OwnForm returns a cause in the form for its own rank: an error about a peer stays as it is, any other becomes an
// abort.
func OwnForm(cause error) error {
	switch {
	case cause == nil:
		return ErrAborted
	case IsRemote(cause), errors.Is(cause, ErrAborted), errors.Is(cause, ErrClosed):
		return cause
	}
	return fmt.Errorf("%w: %w", ErrAborted, cause)
}

// PeerForm returns the cause of rank origin in the form for the other ranks. An error about a third rank stays as it
// is, so that the blame never moves.
func PeerForm(origin int, name string, own error) *PeerError {
	if pe, ok := errors.AsType[*PeerError](own); ok {
		return pe
	}
	return &PeerError{Rank: origin, Name: name, Cause: own}
}

// A deadlineError has the deadline of a transfer.
type deadlineError struct{ limit time.Duration }

func (e deadlineError) Error() string {
	return fmt.Sprintf("no progress for %v, the deadline", e.limit)
}
func (e deadlineError) Unwrap() error { return ErrDeadline }

// Deadline returns the cause of an operation without progress for limit.
func Deadline(limit time.Duration) error { return deadlineError{limit} }

// Mismatch returns the cause of a message that has another size, in bytes, at the other end. send: this rank sends it.
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

// InCall prefixes an error with call and rank.
func InCall(call string, rank, size int, err error) error {
	return fmt.Errorf("%s on rank %d of %d: %w", call, rank, size, err)
}

// A WaitState holds the waits of one rank's parts, for announcements. The zero value is usable.
type WaitState struct {
	mu    sync.Mutex
	waits []wait // guarded by mu; the oldest first
}

// A wait names the peer that one part of a rank waits for.
type wait struct {
	who  any
	peer int
}

// Set records that who, a part of the rank, waits for peer; -1: for none. It returns the peer that the rank as a whole
// has waited for longest, or -1.
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

// An Alarm wakes waiting operations when another rank has waited up to its deadline, so that they announce their own
// waits: they may have begun later, with a deadline far ahead.
type Alarm struct {
	mu   sync.Mutex
	next chan struct{} // guarded by mu

	late atomic.Int32 // the number of overdue ranks
}

// Late records whether a rank is overdue, before and now.
func (a *Alarm) Late(before, now bool) {
	if now {
		a.late.Add(1)
		a.ring()
	}
	if before {
		a.late.Add(-1)
	}
}

// On reports whether any rank is overdue.
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

// ring closes the channel of Next.
func (a *Alarm) ring() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.next != nil {
		close(a.next)
		a.next = nil
	}
}

// SecondLook extends an operation's deadline, at most to twice its length. Meanwhile the ranks exchange their waits, so
// that a ring blames the rank that stopped and not its neighbour. Also, a process that was stopped and continues has
// expired timers before it reads its sockets.
const SecondLook = time.Second

// Waits has the waits among ranks 0 to Ranks()-1.
type Waits interface {
	// Ranks returns the number of ranks.
	Ranks() int
	// WaitsFor returns the peer that a rank waits for, or -1.
	WaitsFor(rank int) int
	// PeerName returns the name of a rank in errors.
	PeerName(rank int) string
}

// Op is an operation that needs peers.
type Op struct {
	What string // "receive of 4096 bytes"
	Way  string // the preposition before its peer: "from", "to" or "with"
}

// Message returns the Op of one message.
func Message(send bool, bytes int) Op {
	if send {
		return Op{fmt.Sprintf("send of %d bytes", bytes), "to"}
	}
	return Op{fmt.Sprintf("receive of %d bytes", bytes), "from"}
}

// On returns an error about a rank; op may be empty.
func On(w Waits, rank int, op string, cause error) *PeerError {
	return &PeerError{Rank: rank, Name: w.PeerName(rank), Op: op, Cause: cause}
}

// Last returns the rank at the end of the chain of waits from first; -1 if the chain is a circle or ends at own.
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

// Stalled returns the error of rank own's operation on peers without progress for limit. It names the first peer that
// does not wait itself. If all wait, as in a ring, it names the rank at the end of the chain; in a circle, the first
// peer.
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
