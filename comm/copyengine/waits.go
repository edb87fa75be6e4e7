package copyengine

import (
	"cmp"
	"slices"
	"time"

	"github.com/cprun/cprun/comm"
)

// via is how the calls of an engine are told from others of the same group.
const via = "copy"

// lockTime is how long Waits tries to look. Who holds the lock for longer stands in the driver.
const lockTime = 100 * time.Millisecond

// Waits returns the calls that are not over, and after a failure those that were not then; see
// comm.Group. Where the driver takes no more work it is
// one call without peers, since nobody can look at the others. It waits for no device.
func (e *Engine) Waits() []comm.Wait {
	if stood := e.stood.Load(); stood != nil {
		return slices.Clone(*stood)
	}
	for start := time.Now(); !e.mu.TryLock(); time.Sleep(time.Millisecond) {
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
		e.tellOpen(byCall, p, true)
		e.tellOpen(byCall, p, false)
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

// tellOpen adds the messages to or from a peer that are not over to their calls. A call has begun for
// a message that this rank's device has come to. e.mu is held.
func (e *Engine) tellOpen(calls map[uint64]*comm.Wait, peer int, send bool) {
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
			continue // the peer is not waited for yet, or this rank is at work on it
		}
		w.Begun, w.Needed = true, true
		o := comm.Open{Peer: e.host.WorldRank(peer), Send: send, Bytes: m.bytes, Moved: e.promised(peer, m.n, send)}
		if q.at.at == m.n {
			o.Since = time.Now().Add(-q.at.stood)
			if w.Since.Before(o.Since) {
				w.Since = o.Since
			}
		}
		w.Open = append(w.Open, o)
	}
}
