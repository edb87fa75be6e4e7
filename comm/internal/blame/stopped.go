package blame

import (
	"fmt"
	"time"
)

// SecondLook is what an operation gets beyond its deadline, or the deadline again if that is
// shorter. The ranks use it to tell each other whom they wait for, so that in a ring the rank
// which stopped is blamed and not the neighbour that waits for it. And a process that was
// stopped and goes on sees its timers run out before it has read what lies in its sockets.
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

// Last returns the other rank at the end of the chain of those that wait for each other from
// first on. It returns -1 where there is none: a circle has no end, and own is not to blame.
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
