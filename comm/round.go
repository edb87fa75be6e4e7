package comm

import (
	"fmt"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// A part is a buffer to or from one rank of the group.
type part struct {
	peer int
	buf  []byte
}

// exchange returns what every call is made of: all sends and receives run at once, and it returns
// when all have ended. It is called on the group's stream only. A part for the own rank is
// the caller's business.
func (g *Group) exchange(sends, recvs []part) error {
	n := len(sends) + len(recvs)
	if err := g.cause(); err != nil {
		return err
	}
	if n == 0 {
		return nil
	}
	if len(g.xfers) < n {
		g.xfers = make([]link.Transfer, n)
	}
	xs := g.xfers[:n]
	g.round.Begin(n)
	for i := range xs {
		g.prepare(&xs[i], i, sends, recvs)
	}
	g.ledger.post(xs)
	// The receives go first: a message that finds its receive posted is not buffered.
	for i := range xs {
		g.link.Post(&xs[i])
	}
	g.await(xs)
	first := failure(xs)
	if first != nil {
		g.keepWaits()
	}
	g.ledger.clear()
	for i := range xs {
		xs[i].Buf = nil // the buffer must not outlive the call
	}
	if first == nil {
		return nil
	}
	g.link.Fail(first)
	g.link.AwaitTold()
	return g.link.Err()
}

// failure returns the first error of transfers that have ended, or nil.
func failure(xs []link.Transfer) error {
	for i := range xs {
		if err := xs[i].Err(); err != nil {
			return err
		}
	}
	return nil
}

// prepare makes x the i-th message of a round: receives first, then sends.
func (g *Group) prepare(x *link.Transfer, i int, sends, recvs []part) {
	seqs, p, send := g.recvSeq, part{}, i >= len(recvs)
	if send {
		seqs, p = g.sendSeq, sends[i-len(recvs)]
	} else {
		p = recvs[i]
	}
	x.Prepare(g.round, link.MsgID{Group: g.id, Seq: seqs[p.peer]}, g.ranks[p.peer], send, p.buf)
	seqs[p.peer]++
}

// alarmLook is for how long a call that begins while a rank is late stands before it says whom it waits
// for.
const alarmLook = 20 * time.Millisecond

// await returns when all transfers have ended. If one stands still for longer than the
// deadline, that ends the transport, and with it all transfers.
func (g *Group) await(xs []link.Transfer) {
	limit := time.Duration(g.limit.Load())
	bell := g.link.Alarm()
	if limit >= 0 {
		first := limit
		if bell.On() { // a rank is late already, and may wait for this one
			first = min(alarmLook, limit)
		}
		g.timer.Reset(first)
		defer g.timer.Stop()
	}
	said := -1 // whom the other ranks know that this one waits for
	say := func(peer int) {
		if peer != said {
			said = peer
			g.link.AnnounceWait(g, peer)
		}
	}
	defer func() { say(-1) }()
	late := false // the deadline has passed
	for alarm := bell.Next(); ; {
		var x *link.Transfer
		var stood time.Duration
		select {
		case <-g.round.Done():
			return
		case <-alarm: // a rank is late, and may wait for this one
			alarm = bell.Next()
			if x, _ = slowest(xs); x != nil {
				say(x.Peer)
			}
			continue
		case <-g.timer.C:
			x, stood = slowest(xs)
		}
		switch {
		case x == nil: // all have ended; done is on its way
			<-g.round.Done()
			return
		case stood < limit:
			late = false
			if bell.On() {
				say(x.Peer)
			} else {
				say(-1)
			}
			g.timer.Reset(limit - stood)
		case !late:
			late = true
			say(x.Peer)
			g.timer.Reset(min(blame.SecondLook, limit))
		default:
			g.link.Fail(g.stalled(x, limit))
			<-g.round.Done()
			return
		}
	}
}

// stalled returns the error of a transfer that has stood still for too long.
func (g *Group) stalled(x *link.Transfer, limit time.Duration) *PeerError {
	err := blame.Stalled(g.link, g.ranks[g.rank], []int{x.Peer}, x.Op(), limit)
	if why := g.link.Unreached(x.Peer); why != nil && err.Rank == x.Peer {
		err.Cause = fmt.Errorf("%w: not connected: %v", err.Cause, why)
	}
	return err
}

// slowest returns the transfer that has not moved for the longest time, or nil where all have
// ended.
func slowest(xs []link.Transfer) (oldest *link.Transfer, stood time.Duration) {
	for i := range xs {
		x := &xs[i]
		if x.Ended() {
			continue
		}
		if d := x.Stood(); oldest == nil || d > stood {
			oldest, stood = x, d
		}
	}
	return oldest, stood
}
