package comm

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrDeadline is the cause of a PeerError whose transfer stood still for too long.
	ErrDeadline = errors.New("no progress within the deadline")
	// ErrPeerLeft is the cause of a PeerError whose peer has closed its side in good order
	// while something was still expected of it.
	ErrPeerLeft = errors.New("has left the group")
	// ErrMismatch is the cause of a PeerError whose peer sends another size than is
	// received, which means that the ranks do not make the same calls.
	ErrMismatch = errors.New("message sizes differ")
	// ErrClosed is what calls on a group get that this rank has closed.
	ErrClosed = errors.New("group closed")
	// ErrProtocol is the cause of a PeerError whose peer sent what no rank may send.
	ErrProtocol = errors.New("protocol violation")
)

// IsRemote reports whether err is a victim's: its cause came from another rank, or is the
// loss or the silence of one. A launcher that looks for the rank which failed first passes
// over such errors as long as some rank reports one of its own.
func IsRemote(err error) bool {
	var pe *PeerError
	return errors.As(err, &pe)
}

// abortError is how the cause given to Abort is reported by the rank that gave it.
type abortError struct{ cause error }

func (e *abortError) Error() string   { return fmt.Sprintf("%v: %v", ErrAborted, e.cause) }
func (e *abortError) Unwrap() []error { return []error{ErrAborted, e.cause} }

// ownForm is a cause as the rank reports it that met it: an error about a peer stays what
// it is, anything else is an abort.
func ownForm(cause error) error {
	switch {
	case cause == nil:
		return ErrAborted
	case IsRemote(cause), errors.Is(cause, ErrAborted), errors.Is(cause, ErrClosed):
		return cause
	}
	return &abortError{cause}
}

// peerForm is the same cause as the other ranks report it. A rank that is itself a victim
// passes on whom it suffered from, so that the blame never moves.
func peerForm(origin int, name string, own error) *PeerError {
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

// rankName is the name of a rank in errors; detail may be empty.
func rankName(rank int, detail string) string {
	if detail == "" {
		return fmt.Sprintf("rank %d", rank)
	}
	return fmt.Sprintf("rank %d (%s)", rank, detail)
}
