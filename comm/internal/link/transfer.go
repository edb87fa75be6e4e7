package link

import (
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
)

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
	Moved  int // bytes so far; of what is sent, also those that are being written
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
