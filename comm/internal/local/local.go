// Package local joins ranks of one process: a message is one copy from the sender's view to the
// receiver's.
package local

import (
	"sync"
	"sync/atomic"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// NewWorld returns a world of n ranks.
func NewWorld(n int) *World {
	w := &World{
		boxes: make([]inbox, n), left: make([]atomic.Bool, n), waits: make([]atomic.Int32, n),
		waitStates: make([]blame.WaitState, n),
		failed:     make(chan struct{}),
	}
	for r := range n {
		w.boxes[r].slots = map[slotID]*link.Transfer{}
	}
	return w
}

// A World joins the ranks of one process. The second end of a message copies it, outside of every lock.
type World struct {
	boxes      []inbox        // per receiving rank
	left       []atomic.Bool  // ranks that have closed
	waits      []atomic.Int32 // 1 + the peer that each rank waits for, or 0
	waitStates []blame.WaitState
	alarm      blame.Alarm

	mu     sync.Mutex
	origin int   // guarded by mu; the rank that failed first
	cause  error // guarded by mu; in the form of that rank

	failed chan struct{} // closed when cause is set
}

type inbox struct {
	mu    sync.Mutex
	slots map[slotID]*link.Transfer // guarded by mu; the end that came first
}

type slotID struct {
	src int
	id  link.MsgID
}

// Link returns rank r's side.
func (w *World) Link(r int) link.Link {
	l := &rank{w, r}
	return link.Link{Transport: l, Roster: l}
}

// A rank is one rank's side of a world.
type rank struct {
	w    *World
	rank int
}

func (l *rank) PeerName(rank int) string { return blame.RankName(rank, "") }
func (l *rank) Forget(uint64)            {}
func (l *rank) AwaitNotified()           {}
func (l *rank) Unreached(int) error      { return nil }
func (l *rank) Ranks() int               { return len(l.w.boxes) }
func (l *rank) WaitsFor(rank int) int    { return int(l.w.waits[rank].Load()) - 1 }
func (l *rank) Failed() <-chan struct{}  { return l.w.failed }
func (l *rank) HasLeft(rank int) bool    { return l.w.left[rank].Load() }

func (l *rank) Alarm() *blame.Alarm { return &l.w.alarm }

func (l *rank) AnnounceWait(who any, peer int) {
	peer = l.w.waitStates[l.rank].Set(who, peer)
	if was := l.w.waits[l.rank].Swap(int32(peer + 1)); int(was) != peer+1 {
		l.w.alarm.Late(was > 0, peer >= 0)
	}
}

func (l *rank) Err() error {
	w := l.w
	if w.left[l.rank].Load() {
		return blame.ErrClosed
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause == nil || w.origin == l.rank {
		return w.cause
	}
	return blame.PeerForm(w.origin, blame.RankName(w.origin, ""), w.cause)
}

func (l *rank) Post(t *link.Transfer) {
	src, dst := l.rank, t.Peer
	if !t.Send {
		src, dst = t.Peer, l.rank
	}
	box, slot := &l.w.boxes[dst], slotID{src, t.ID}
	box.mu.Lock()
	// A failure or departure is published before the boxes are emptied, so that a transfer added after this check is
	// found then.
	if err := l.refusal(t.Peer); err != nil {
		box.mu.Unlock()
		t.Finish(err)
		return
	}
	other, ok := box.slots[slot]
	if !ok {
		box.slots[slot] = t
		box.mu.Unlock()
		return
	}
	delete(box.slots, slot)
	box.mu.Unlock()
	if len(t.Buf) != len(other.Buf) {
		t.Finish(t.Mismatch(l.PeerName(t.Peer), len(other.Buf)))
		other.Finish(other.Mismatch(l.PeerName(l.rank), len(t.Buf)))
		return
	}
	if t.Send {
		copy(other.Buf, t.Buf)
	} else {
		copy(t.Buf, other.Buf)
	}
	other.Finish(nil)
	t.Finish(nil)
}

// refusal returns the error of later transfers with a peer, or nil.
func (l *rank) refusal(peer int) error {
	if err := l.Err(); err != nil {
		return err
	}
	if l.w.left[peer].Load() {
		return blame.On(l, peer, "", blame.ErrPeerLeft)
	}
	return nil
}

func (l *rank) Fail(cause error) {
	w := l.w
	w.mu.Lock()
	if w.cause != nil || w.left[l.rank].Load() {
		w.mu.Unlock()
		return
	}
	w.origin, w.cause = l.rank, blame.OwnForm(cause)
	close(w.failed)
	w.mu.Unlock()
	w.drain(func(owner, _ int) error { return (&rank{w, owner}).Err() })
}

func (l *rank) Close() error {
	w := l.w
	if w.left[l.rank].Swap(true) {
		return nil
	}
	w.drain(func(owner, peer int) error {
		switch l.rank {
		case owner:
			return blame.ErrClosed
		case peer:
			return blame.On(l, peer, "", blame.ErrPeerLeft)
		}
		return nil
	})
	return nil
}

// drain finishes the waiting transfers for which verdict returns an error.
func (w *World) drain(verdict func(owner, peer int) error) {
	for dst := range w.boxes {
		box := &w.boxes[dst]
		box.mu.Lock()
		for slot, t := range box.slots {
			owner := dst
			if t.Send {
				owner = slot.src
			}
			if err := verdict(owner, t.Peer); err != nil {
				delete(box.slots, slot)
				t.Finish(err)
			}
		}
		box.mu.Unlock()
	}
}
