// Package link is the base of a group: it carries messages, and knows the ranks that are there. The in-process world
// (comm/internal/local) and the sockets (comm/internal/wire) implement it. Groups of devices reach it through
// comm.Group.Link.
package link

import (
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
)

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
	// AwaitNotified blocks until the other ranks have been told of a failure, as far as they can
	// be reached within a short bound. It returns at once when there was none.
	AwaitNotified()
	// Err returns the cause of the failure as this rank reports it, or nil.
	Err() error
	// Failed returns a channel that is closed at the first failure. A transport may close it
	// when it is closed as well.
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

// MsgID names a message between two given ranks: Seq counts the messages of a Group.
type MsgID struct{ Group, Seq uint64 }

// Transfer is one end of one message. The buffer belongs to the transport from Post until
// Finish.
type Transfer struct {
	ID   MsgID
	Peer int // world rank
	Send bool
	Buf  []byte

	// What follows is the transport's. Both are 0 at first.
	Moved  int // bytes so far; for a send, including those being written
	Flying int // pieces that are being written

	posted  int64        // when it was made, by now()
	touched atomic.Int64 // when it last moved, by now()
	ended   atomic.Bool
	err     error // set before ended
	round   *Round
}

// Round is a set of transfers that run at once and are waited for together.
type Round struct {
	left atomic.Int32
	done chan struct{} // gets one value when left comes to zero
}

// NewRound returns a round that can be used again and again.
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
	t.posted = now()
	t.touched.Store(t.posted)
}

// Touch notes that t has moved.
func (t *Transfer) Touch() { t.touched.Store(now()) }

// Stood returns for how long t has not moved.
func (t *Transfer) Stood() time.Duration { return time.Duration(now() - t.touched.Load()) }

// HasMoved reports whether some of t has moved.
func (t *Transfer) HasMoved() bool { return t.touched.Load() != t.posted }

// Finish ends the transfer. It is called exactly once, and t is the caller's no more.
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

// Err returns what t was finished with.
func (t *Transfer) Err() error { return t.err }

// Op returns how errors name the transfer.
func (t *Transfer) Op() blame.Op { return blame.Message(t.Send, len(t.Buf)) }

// Mismatch returns the error of a transfer whose other end, at a rank of that name, has another
// size in bytes.
func (t *Transfer) Mismatch(peer string, other int) *blame.PeerError {
	return &blame.PeerError{Rank: t.Peer, Name: peer, Op: t.Op().What, Cause: blame.Mismatch(t.Send, other)}
}
