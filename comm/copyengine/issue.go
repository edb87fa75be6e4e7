package copyengine

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/pace"
)

// progress issues all work that the device and the peers can take now, without waiting, and reports whether some waits
// for a peer's host. e.mu is held.
func (e *Engine) progress() (waiting bool) {
	for {
		for p := range e.board.ranks {
			e.publish(p)
			e.issue(p)
		}
		if len(e.deferred) == 0 || !e.freeQueued() || e.err() != nil {
			break
		}
		c := &e.deferred[0]
		e.order.wait(e.board.flag(e.rank, e.rank, flagCalled), c.n)
		for p := range e.board.ranks {
			if n := e.sends[p].free; n > 0 {
				e.order.wait(e.board.flag(e.rank, p, flagSent), n)
			}
			if n := e.receives[p].free; n > 0 {
				e.order.wait(e.board.flag(e.rank, p, flagArrived), n)
			}
		}
		e.begin(c, e.order)
		e.deferred = append(e.deferred[:0], e.deferred[1:]...)
	}
	for p := range e.board.ranks {
		waiting = waiting || len(e.receives[p].todo) > 0 || len(e.sends[p].todo) > 0
	}
	return waiting || len(e.deferred) > 0
}

// begin queues the flags of a call on a lane; progress queues its messages.
func (e *Engine) begin(c *call, lane lane) {
	for _, r := range c.p.recvd {
		lane.write(e.board.flag(r.peer, e.rank, flagReady), r.n)
		e.receives[r.peer].free = r.n
	}
	for _, s := range c.p.sent {
		lane.write(e.board.flag(e.rank, s.peer, flagBegun), s.n)
		e.sends[s.peer].free = s.n
	}
	for _, m := range c.ins {
		e.receives[m.peer].todo = append(e.receives[m.peer].todo, m.message)
	}
	for _, m := range c.outs {
		e.sends[m.peer].todo = append(e.sends[m.peer].todo, m.message)
	}
}

// loose reports whether earlier messages may be under way that the compute stream does not wait for.
func (e *Engine) loose() bool {
	for p := range e.board.ranks {
		if n := e.sends[p].free; n > 0 && !reached(e.board.at(e.rank, p, flagSent), n) {
			return true
		}
		if n := e.receives[p].free; n > 0 && !reached(e.board.at(e.rank, p, flagArrived), n) {
			return true
		}
	}
	return false
}

// freeQueued reports whether the copies of all messages without a wait of the compute stream are queued.
func (e *Engine) freeQueued() bool {
	for p := range e.board.ranks {
		if !e.promised(p, e.sends[p].free, true) || !e.promised(p, e.receives[p].free, false) {
			return false
		}
	}
	return true
}

// promised reports whether the copy of a message to or from a peer is queued, so that it happens whatever the peer's
// host does.
func (e *Engine) promised(peer int, n uint64, send bool) bool {
	s, r := e.rank, peer
	if !send {
		s, r = peer, e.rank
	}
	return reached(atomic.LoadUint64(e.board.queued(s, r)), n)
}

// publish posts receives from a peer while the board has room.
func (e *Engine) publish(peer int) {
	q := &e.receives[peer]
	for len(q.todo) > 0 && e.err() == nil {
		m := &q.todo[0]
		post := notice{bytes: uint64(m.bytes), place: m.place}
		if !e.board.put(peer, e.rank, m.n, &post) {
			return
		}
		q.pop(1)
	}
}

// issue queues the copies to a peer that has posted receives.
func (e *Engine) issue(peer int) {
	q := &e.sends[peer]
	for len(q.todo) > 0 && e.err() == nil {
		n := e.taken(peer, q.todo)
		if n == 0 {
			return
		}
		err := e.copyAll(peer, q.todo[:n])
		if err != nil {
			e.fail(err)
		}
		if e.err() != nil { // the copies may not be queued
			return
		}
		atomic.StoreUint64(e.board.queued(e.rank, peer), q.todo[n-1].n)
		q.pop(n)
	}
}

// taken returns how many of the messages have a posted receive. They follow one wait: all are of one call, here and
// there, because a call begins when the copies of earlier ones are queued.
func (e *Engine) taken(peer int, todo []message) int {
	if peer == e.rank {
		return len(todo)
	}
	posted, n := atomic.LoadUint64(e.board.posted(e.rank, peer)), 0
	for n < len(todo) && reached(posted, todo[n].n) {
		n++
	}
	return n
}

// copyAll queues the copies of a batch between its waits and the writes that report it.
func (e *Engine) copyAll(peer int, ms []message) error {
	for i := range ms {
		if err := e.locate(peer, &ms[i]); err != nil {
			return err
		}
	}
	last, l := ms[len(ms)-1].n, e.lanes[peer]
	l.wait(e.board.flag(e.rank, peer, flagBegun), last)
	if peer != e.rank {
		l.wait(e.board.flag(e.rank, peer, flagReady), last)
	}
	for _, m := range ms {
		if m.bytes > 0 {
			l.stream().Label(m.label)
			l.copy(m.dst, m.src, m.bytes, peer)
		}
	}
	l.write(e.board.flag(e.rank, peer, flagSent), last)
	if peer != e.rank {
		l.write(e.board.flag(peer, e.rank, flagArrived), last)
	}
	return nil
}

// locate finds the destination of a message.
func (e *Engine) locate(peer int, m *message) error {
	if peer == e.rank {
		return nil
	}
	post := *e.board.post(e.rank, peer, m.n) // a copy, since the peer may write it again after the check
	if post.bytes != uint64(m.bytes) {
		return e.blame(peer, describe(m, true).What, blame.Mismatch(true, int(post.bytes)))
	}
	if m.bytes == 0 {
		return nil
	}
	r, err := e.dev.reach(&post.place, e.same[peer])
	if err == nil {
		m.dst, err = r.at(post.place.offset, post.bytes)
	}
	if err != nil {
		return fmt.Errorf("memory of %s: %w", e.peerName(peer), err)
	}
	return nil
}

// pop takes n messages off the front, and keeps the memory.
func (q *backlog) pop(n int) { q.todo = append(q.todo[:0], q.todo[n:]...) }

// forget drops the messages up to number at, which are over.
func (q *backlog) forget(at uint64) {
	n := 0
	for n < len(q.open) && reached(at, q.open[n].n) {
		n++
	}
	q.open = append(q.open[:0], q.open[n:]...)
}

// via names the carrier of an engine's calls in Waits.
const via = "copy"

// lockTime bounds the wait of Waits for the lock.
const lockTime = 100 * time.Millisecond

// Waits returns the pending calls, and after a failure those of that time; see comm.Group. If the driver takes no more
// work, the engine's state is locked: Waits then returns one call without peers. It waits for no device.
func (e *Engine) Waits() []comm.Wait {
	if stood := e.stood.Load(); stood != nil {
		return slices.Clone(*stood)
	}
	// The holder may be blocked in the driver, and Lock cannot give up, so this tries again and again.
	start := time.Now()
	for pause := (pace.Backoff{}); !e.mu.TryLock(); pause.Wait() {
		if time.Since(start) > lockTime {
			return []comm.Wait{{Op: "exchange behind a full queue of the device", Group: e.host.ID(), Via: via,
				Begun: true, Needed: true, Since: start}}
		}
	}
	defer e.mu.Unlock()
	if e.gone {
		return nil
	}
	byCall := map[uint64]*comm.Wait{}
	for p := range e.board.ranks {
		e.addOpen(byCall, p, true)
		e.addOpen(byCall, p, false)
	}
	var all []comm.Wait
	for _, w := range byCall {
		slices.SortStableFunc(w.Open, func(a, b comm.Open) int { return cmp.Compare(a.Peer, b.Peer) })
		w.More = max(len(w.Open)-comm.MaxOpen, 0)
		w.Open = w.Open[:len(w.Open)-w.More]
		all = append(all, *w)
	}
	slices.SortFunc(all, func(a, b comm.Wait) int { return cmp.Compare(a.Call, b.Call) })
	return all[:min(len(all), comm.MaxWaits)]
}

// addOpen adds the pending messages to or from a peer to their calls. A call has begun for a message that this rank's
// device has come to. e.mu is held.
func (e *Engine) addOpen(calls map[uint64]*comm.Wait, peer int, send bool) {
	b, q := e.board, &e.receives[peer]
	mine, done := b.at(peer, e.rank, flagReady), b.at(e.rank, peer, flagArrived)
	if send {
		q, mine, done = &e.sends[peer], b.at(e.rank, peer, flagBegun), b.at(e.rank, peer, flagSent)
	}
	for i := range q.open {
		m := &q.open[i]
		if reached(done, m.n) {
			continue
		}
		w := calls[m.call]
		if w == nil {
			w = &comm.Wait{Op: "exchange", Label: m.label, Group: e.host.ID(), Via: via, Call: m.call}
			calls[m.call] = w
		}
		w.Bytes += m.bytes
		if !reached(mine, m.n) || peer == e.rank {
			continue // this rank still works on it
		}
		w.Begun, w.Needed = true, true
		o := comm.Open{Peer: e.host.WorldRank(peer), Send: send, Bytes: m.bytes}
		if q.at.at == m.n {
			o.Since = time.Now().Add(-q.at.stood)
			if w.Since.Before(o.Since) {
				w.Since = o.Since
			}
		}
		w.Open = append(w.Open, o)
	}
}
