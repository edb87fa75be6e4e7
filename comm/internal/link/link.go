// Package link is what a group stands on: how its messages travel, and who is there. The
// in-process world (comm/internal/local) and the sockets (comm/internal/wire) implement it. What
// builds on a group, of devices, reaches it through comm.Group.Link.
package link

import "github.com/cprun/cprun/comm/internal/blame"

// A Transport carries messages between the ranks of a world. Ranks here are world ranks.
// A message is named by its group and by its number among the messages from one rank to
// another in that group, so that the two ends meet in whatever order they come.
//
// One failure ends a transport as a whole: every posted transfer, now and later, finishes
// with the first cause.
type Transport interface {
	// Post starts a transfer and returns at once. The transport calls t.Finish when it no
	// longer needs the buffer, and does not touch t after that.
	Post(t *Transfer)
	// Fail ends the transport and tells the other ranks why. It does not block; only the
	// first cause counts.
	Fail(cause error)
	// AwaitTold blocks until the other ranks have been told of a failure, as far as they can
	// be reached within a short bound. It returns at once when there was none.
	AwaitTold()
	// Err returns the cause of the failure as this rank reports it, or nil.
	Err() error
	// Failed returns a channel that is closed at the first failure. A transport may close it
	// when it is closed, too.
	Failed() <-chan struct{}
	// Forget drops what is kept of a group that has been closed here.
	Forget(group uint64)
	// Close says goodbye to the other ranks and gives everything back.
	Close() error
}

// A Roster knows who is there: the ranks of a world, their names, who has left, and who waits
// for whom. Ranks here are world ranks.
type Roster interface {
	blame.Waits // Ranks, WaitsFor and PeerName; a rank waits for whom it has announced
	// HasLeft reports whether a rank has said goodbye.
	HasLeft(rank int) bool
	// Unreached returns why there is no connection with a rank, where one is being made and
	// something stands in its way.
	Unreached(rank int) error
	// AnnounceWait tells the other ranks whom a part of this one waits for. -1 clears it.
	AnnounceWait(who any, peer int)
	// Alarm returns what rings when another rank announces a wait.
	Alarm() *blame.Alarm
}

// Link is one rank's side of a world.
type Link struct {
	Transport
	Roster
	// Nodes says which node each rank is on, by any numbers; nil means that all share one.
	Nodes []int
	// Pairs is up to which size all pairs of a group talk to each other in a collective. In a
	// larger group each rank talks to few. 0 means any size.
	Pairs int
}

// Few reports whether each rank of a group of n should talk to few others.
func (l *Link) Few(n int) bool { return l.Pairs > 0 && n > l.Pairs && n > 1 }

// Neighbours returns whom rank talks to in collectives over few neighbours, in a group of n:
// the ranks at distances of 1, 2, 4 and so on, in both directions around. It calls f once for
// each.
func Neighbours(rank, n int, f func(peer int)) {
	for d := 1; d < n; d *= 2 {
		f((rank + d) % n)
		if e := n - d; e&(e-1) != 0 { // else e forwards is another of these distances, or this one
			f((rank + e) % n)
		}
	}
}
