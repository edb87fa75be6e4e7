package comm

import (
	"sync/atomic"
	"time"
)

// A transport carries messages between the ranks of a world. Ranks here are world ranks.
// A message is named by its group and by its number among the messages from one rank to
// another in that group, so that the two ends meet in whatever order they come.
//
// One failure ends a transport as a whole: every posted transfer, now and later, finishes
// with the first cause.
type transport interface {
	// post starts a transfer and returns at once. The transport calls t.finish when it no
	// longer needs the buffer, and does not touch t after that.
	post(t *transfer)
	// fail ends the transport and tells the other ranks why. It does not block; only the
	// first cause counts.
	fail(cause error)
	// flush waits until the other ranks have been told of a failure, as far as they can be
	// reached within a short bound. It returns at once when there was none.
	flush()
	// err is the cause of the failure as this rank reports it, or nil.
	err() error
	// failed is closed at the first failure. A transport may close it when it is closed, too.
	failed() <-chan struct{}
	// hasLeft reports whether a rank has said goodbye.
	hasLeft(rank int) bool
	// peerName is how errors name a rank.
	peerName(rank int) string
	// stand tells the other ranks whom this one stands waiting for, -1 for nobody any more.
	stand(peer int)
	// ranks is the size of the world.
	ranks() int
	// standsOn is whom a rank has said that it stands waiting for, or -1.
	standsOn(rank int) int
	// forget drops what is kept of a group that has been closed here.
	forget(group uint64)
	// close says goodbye to the other ranks and gives everything back.
	close() error
}

// msgID names a message between two given ranks.
type msgID struct{ group, seq uint64 }

// transfer is one end of one message. The buffer belongs to the transport from post until
// finish.
type transfer struct {
	id   msgID
	peer int // world rank
	send bool
	buf  []byte

	moved   int          // bytes so far; used by the transport alone
	touched atomic.Int64 // when it last moved, by now()
	ended   atomic.Bool
	err     error // set before finish
	round   *round
}

// round is a set of transfers that run at once and are waited for together.
type round struct {
	left atomic.Int32
	done chan struct{} // gets one value when left comes to zero
}

var epoch = time.Now()

// now is a monotonic clock that fits an atomic.
func now() int64 { return int64(time.Since(epoch)) }

func (t *transfer) touch() { t.touched.Store(now()) }

// finish ends the transfer. It is called exactly once, and t is the caller's no more.
func (t *transfer) finish(err error) {
	r := t.round
	t.err = err
	t.ended.Store(true)
	if r.left.Add(-1) == 0 {
		r.done <- struct{}{}
	}
}

func (t *transfer) verb() string {
	if t.send {
		return "send"
	}
	return "receive"
}

func (t *transfer) preposition() string {
	if t.send {
		return "to"
	}
	return "from"
}
