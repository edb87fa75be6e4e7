// Package blame says whose fault a failure is: the errors of a group, in the words of the rank
// that met one and of those that are told, and the search for the rank that stopped among many
// that wait for each other. Every part of comm reports through it.
package blame

import (
	"errors"
	"fmt"
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

// PeerError says which peer a transfer failed on. It is what every other rank reports when
// one rank dies.
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
