// Package link defines the base of a group: a Transport carries messages, and a Roster knows the ranks. The in-process
// world (comm/internal/local) and the sockets (comm/internal/wire) implement both. Groups of devices reach their Link
// by comm.Group.Link.
package link

import (
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
)

// A Transport carries messages between the ranks of a world, by world ranks. A message is identified by its group, and
// by its number among the messages from one rank to another in that group, so that its two ends match in any order of
// posting.
//
// One failure ends a transport as a whole: every posted transfer, now and later, finishes with the first cause.
type Transport interface {
	// Post starts a transfer and returns at once. The transport calls t.Finish when it no longer needs the buffer, and
	// does not touch t after that.
	Post(t *Transfer)
	// Fail ends the transport and informs the other ranks of the cause. It does not block; only the first cause counts.
	Fail(cause error)
	// AwaitNotified blocks until the other ranks are informed of a failure, as far as it can reach them within a short
	// bound. Without a failure it returns at once.
	AwaitNotified()
	// Err returns the cause of the failure as this rank reports it, or nil.
	Err() error
	// Failed returns a channel that is closed at the first failure. A transport may also close it in Close.
	Failed() <-chan struct{}
	// Forget drops the state of a group that has been closed here.
	Forget(group uint64)
	// Close sends a goodbye to the other ranks and frees all resources.
	Close() error
}

// A Roster has the ranks of a world with their names, departures and waits, by world rank.
type Roster interface {
	blame.Waits // Ranks, WaitsFor and PeerName; a rank waits for whom it has announced
	// HasLeft reports whether a rank has sent its goodbye.
	HasLeft(rank int) bool
	// Unreached returns the obstacle to a connection with a rank that is being made; nil: none.
	Unreached(rank int) error
	// AnnounceWait informs the other ranks of the peer that a part of this rank waits for. -1 clears it.
	AnnounceWait(who any, peer int)
	// Alarm returns the alarm that rings when another rank announces a wait.
	Alarm() *blame.Alarm
}

// Link is one rank's side of a world.
type Link struct {
	Transport
	Roster
	// Nodes has the node of each rank, by any numbers; nil: all share one.
	Nodes []int
	// Pairs is the largest group whose collectives use all pairs of ranks. In a larger group each rank uses few; 0: no
	// limit.
	Pairs int
}

// Few reports whether each rank of a group of n uses few others.
func (l *Link) Few(n int) bool { return l.Pairs > 0 && n > l.Pairs && n > 1 }

// Neighbours calls f once for each neighbour of rank in collectives over few ranks, in a group of n: the ranks at
// distances of 1, 2, 4 and so on, in both directions.
func Neighbours(rank, n int, f func(peer int)) {
	for d := 1; d < n; d *= 2 {
		f((rank + d) % n)
		if e := n - d; e&(e-1) != 0 { // else e forwards is another of these distances, or this one
			f((rank + e) % n)
		}
	}
}

// MsgID identifies a message between two given ranks: Seq counts the messages of a Group.
type MsgID struct{ Group, Seq uint64 }

// Transfer is one end of one message. The buffer belongs to the transport from Post until
// Finish.
type Transfer struct {
	ID   MsgID
	Peer int // world rank
	Send bool
	Buf  []byte

	// The transport uses the fields below. Both are 0 at first.
	Moved  int // bytes so far; for a send, including those being written
	Flying int // pieces that are being written

	touched atomic.Int64 // when it was made or last moved, by now()
	ended   atomic.Bool
	err     error // set before ended
	round   *Round
}

// Round is a set of concurrent transfers with one wait.
type Round struct {
	left atomic.Int32
	done chan struct{} // gets one value when left comes to zero
}

// NewRound returns a reusable round.
func NewRound() *Round { return &Round{done: make(chan struct{}, 1)} }

// Begin expects n transfers to end.
func (r *Round) Begin(n int) { r.left.Store(int32(n)) }

// Done returns the channel that gets one value when all transfers have ended.
func (r *Round) Done() <-chan struct{} { return r.done }

var epoch = time.Now()

// now returns a monotonic clock that fits an atomic.
func now() int64 { return int64(time.Since(epoch)) }

// Prepare makes t a new transfer of a round, to be posted.
func (t *Transfer) Prepare(r *Round, id MsgID, peer int, send bool, buf []byte) {
	t.ID, t.Peer, t.Send, t.Buf, t.Moved, t.Flying, t.err, t.round = id, peer, send, buf, 0, 0, nil, r
	t.ended.Store(false)
	t.touched.Store(now())
}

// Touch records progress of t.
func (t *Transfer) Touch() { t.touched.Store(now()) }

// Stood returns the time since the last progress of t.
func (t *Transfer) Stood() time.Duration { return time.Duration(now() - t.touched.Load()) }

// Finish ends the transfer. The transport calls it exactly once, and uses t no more.
func (t *Transfer) Finish(err error) {
	r := t.round
	t.err = err
	t.ended.Store(true)
	if r.left.Add(-1) == 0 {
		r.done <- struct{}{}
	}
}

// Ended reports whether t has been finished.
func (t *Transfer) Ended() bool { return t.ended.Load() }

// Err returns the error of Finish.
func (t *Transfer) Err() error { return t.err }

// Op returns the transfer's name in errors.
func (t *Transfer) Op() blame.Op { return blame.Message(t.Send, len(t.Buf)) }

// Mismatch returns the error of a transfer with another size, in bytes, at the other end, a rank of that name.
func (t *Transfer) Mismatch(peer string, other int) *blame.PeerError {
	return &blame.PeerError{Rank: t.Peer, Name: peer, Op: t.Op().What, Cause: blame.Mismatch(t.Send, other)}
}
