package comm

import (
	"fmt"
	"time"
)

// part is a buffer to or from one rank of the group.
type part struct {
	peer int
	buf  []byte
}

// exchange is what every call is made of: all sends and receives run at once, and it returns
// when all have ended. It is called on the group's stream only. A part for the own rank is
// the caller's business.
func (g *Group) exchange(sends, recvs []part) error {
	n := len(sends) + len(recvs)
	if err := g.t.err(); err != nil {
		return err
	}
	if n == 0 {
		return nil
	}
	if len(g.xfers) < n {
		g.xfers = make([]transfer, n)
	}
	xs := g.xfers[:n]
	g.round.left.Store(int32(n))
	for i := range xs {
		g.prepare(&xs[i], i, sends, recvs)
	}
	// The receives go first: a message that finds its receive posted is not buffered.
	for i := range xs {
		g.t.post(&xs[i])
	}
	g.await(xs)
	var first error
	for i := range xs {
		x := &xs[i]
		if x.err != nil && first == nil {
			first = x.err
		}
		if x.send {
			g.sent.Add(int64(len(x.buf)))
		} else {
			g.received.Add(int64(len(x.buf)))
		}
		x.buf = nil // the buffer must not outlive the call
	}
	if first == nil {
		return nil
	}
	g.t.fail(first)
	g.t.flush()
	return g.t.err()
}

func (g *Group) prepare(x *transfer, i int, sends, recvs []part) {
	seqs, p := g.recvSeq, part{}
	if x.send = i >= len(recvs); x.send {
		seqs, p = g.sendSeq, sends[i-len(recvs)]
	} else {
		p = recvs[i]
	}
	x.id = msgID{g.id, seqs[p.peer]}
	seqs[p.peer]++
	x.peer, x.buf, x.moved, x.err, x.round = g.ranks[p.peer], p.buf, 0, nil, &g.round
	x.ended.Store(false)
	x.touch()
}

// secondLook is what a transfer gets beyond its deadline, or the deadline again if that is
// shorter. The ranks use it to tell each other whom they stand waiting for, so that in a ring
// the rank which stopped is blamed and not the neighbour that waits for it. And a process that
// was stopped and goes on sees its timers run out before it has read what lies in its sockets.
const secondLook = time.Second

// await returns when all transfers have ended. If one stands still for longer than the
// deadline, that ends the transport, and with it all transfers.
func (g *Group) await(xs []transfer) {
	limit := g.opts.Deadline
	if limit < 0 {
		<-g.round.done
		return
	}
	g.timer.Reset(limit)
	defer g.timer.Stop()
	looked := false
	defer func() {
		if looked {
			g.t.stand(-1)
		}
	}()
	for {
		select {
		case <-g.round.done:
			return
		case <-g.timer.C:
		}
		x, stood := standing(xs)
		switch {
		case x == nil: // all have ended; done is on its way
			<-g.round.done
			return
		case stood < limit:
			if looked {
				looked = false
				g.t.stand(-1)
			}
			g.timer.Reset(limit - stood)
		case !looked:
			looked = true
			g.t.stand(x.peer)
			g.timer.Reset(min(secondLook, limit))
		default:
			g.t.fail(g.silent(x, limit))
			<-g.round.done
			return
		}
	}
}

// silent is the error of a transfer that has stood still for too long.
func (g *Group) silent(x *transfer, limit time.Duration) *PeerError {
	op, rank := fmt.Sprintf("%s of %d bytes", x.verb(), len(x.buf)), x.peer
	for range g.t.ranks() { // a circle of ranks that wait for each other has no end
		next := g.t.standsOn(rank)
		if next < 0 {
			break
		}
		rank = next
	}
	if g.t.standsOn(rank) >= 0 || rank == g.ranks[g.rank] {
		rank = x.peer
	}
	if rank != x.peer {
		op += fmt.Sprintf(" %s %s, which waits itself", x.preposition(), g.t.peerName(x.peer))
	}
	return &PeerError{Rank: rank, Name: g.t.peerName(rank), Op: op, Cause: deadlineError{limit}}
}

// standing is the transfer that has not moved for the longest time.
func standing(xs []transfer) (oldest *transfer, stood time.Duration) {
	at := now()
	for i := range xs {
		x := &xs[i]
		if x.ended.Load() {
			continue
		}
		if d := time.Duration(at - x.touched.Load()); oldest == nil || d > stood {
			oldest, stood = x, d
		}
	}
	return oldest, stood
}
