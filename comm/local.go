package comm

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cprun/cprun/internal/tensor"
)

// worldID is the group id of the group that a constructor makes.
const worldID = 0

// NewLocal joins n ranks of this process. Messages are one copy from the sender's view to
// the receiver's. Rank r's calls are ordered against compute[r]; a nil slice or element
// means a private stream, for callers that only use Sync. Each group is closed on its own.
func NewLocal(n int, compute []tensor.Stream, opts Options) []*Group {
	if n < 1 || compute != nil && len(compute) != n {
		panic(fmt.Sprintf("comm: local world of %d ranks with %d compute streams", n, len(compute)))
	}
	w, ranks := newLocalWorld(n), make([]int, n)
	for r := range n {
		ranks[r] = r
	}
	groups := make([]*Group, n)
	for r := range n {
		var s tensor.Stream
		if compute != nil {
			s = compute[r]
		}
		groups[r] = newGroup(&localLink{w, r}, worldID, ranks, r, s, opts.withDefaults())
	}
	return groups
}

func newLocalWorld(n int) *localWorld {
	w := &localWorld{
		boxes: make([]localBox, n), left: make([]atomic.Bool, n), stood: make([]atomic.Int32, n),
		failed: make(chan struct{}),
	}
	for r := range n {
		w.boxes[r].slots = map[localSlot]*transfer{}
	}
	return w
}

// localWorld is where the ranks of one process meet. Whoever comes second to a message
// copies it, outside of every lock.
type localWorld struct {
	boxes []localBox     // per receiving rank
	left  []atomic.Bool  // ranks that have closed
	stood []atomic.Int32 // 1 + whom each rank stands waiting for, or 0

	mu     sync.Mutex
	origin int   // guarded by mu; the rank that failed first
	cause  error // guarded by mu; in the form of that rank

	failed chan struct{} // closed when cause is set
}

type localBox struct {
	mu    sync.Mutex
	slots map[localSlot]*transfer // guarded by mu; the end that came first
}

type localSlot struct {
	src int
	id  msgID
}

// localLink is one rank's transport.
type localLink struct {
	w    *localWorld
	rank int
}

func (l *localLink) peerName(rank int) string { return rankName(rank, "") }
func (l *localLink) forget(uint64)            {}
func (l *localLink) flush()                   {}
func (l *localLink) ranks() int               { return len(l.w.boxes) }
func (l *localLink) stand(peer int)           { l.w.stood[l.rank].Store(int32(peer + 1)) }
func (l *localLink) standsOn(rank int) int    { return int(l.w.stood[rank].Load()) - 1 }
func (l *localLink) failed() <-chan struct{}  { return l.w.failed }
func (l *localLink) hasLeft(rank int) bool    { return l.w.left[rank].Load() }

func (l *localLink) err() error {
	if l.w.left[l.rank].Load() {
		return ErrClosed
	}
	return l.w.errFor(l.rank)
}

// errFor is the failure of the world as one rank reports it.
func (w *localWorld) errFor(rank int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause == nil || w.origin == rank {
		return w.cause
	}
	return peerForm(w.origin, rankName(w.origin, ""), w.cause)
}

func (l *localLink) post(t *transfer) {
	src, dst := l.rank, t.peer
	if !t.send {
		src, dst = t.peer, l.rank
	}
	box, slot := &l.w.boxes[dst], localSlot{src, t.id}
	box.mu.Lock()
	// A failure and a leave are published before the boxes are emptied, so what is put
	// into a box after this look is found by whoever empties it.
	if err := l.refusal(t.peer); err != nil {
		box.mu.Unlock()
		t.finish(err)
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
	if len(t.buf) != len(other.buf) {
		t.finish(mismatch(t, l.peerName(t.peer), len(other.buf)))
		other.finish(mismatch(other, l.peerName(l.rank), len(t.buf)))
		return
	}
	if t.send {
		copy(other.buf, t.buf)
	} else {
		copy(t.buf, other.buf)
	}
	other.finish(nil)
	t.finish(nil)
}

// refusal is why nothing can be exchanged with a peer any more, or nil.
func (l *localLink) refusal(peer int) error {
	if err := l.err(); err != nil {
		return err
	}
	if l.w.left[peer].Load() {
		return &PeerError{Rank: peer, Name: l.peerName(peer), Cause: ErrPeerLeft}
	}
	return nil
}

func (l *localLink) fail(cause error) {
	w := l.w
	w.mu.Lock()
	if w.cause != nil || w.left[l.rank].Load() {
		w.mu.Unlock()
		return
	}
	w.origin, w.cause = l.rank, ownForm(cause)
	close(w.failed)
	w.mu.Unlock()
	w.drain(func(owner, _ int) error { return (&localLink{w, owner}).err() })
}

func (l *localLink) close() error {
	w := l.w
	if w.left[l.rank].Swap(true) {
		return nil
	}
	w.drain(func(owner, peer int) error {
		switch l.rank {
		case owner:
			return ErrClosed
		case peer:
			return &PeerError{Rank: peer, Name: l.peerName(peer), Cause: ErrPeerLeft}
		}
		return nil
	})
	return nil
}

// drain finishes the waiting transfers that verdict has an error for.
func (w *localWorld) drain(verdict func(owner, peer int) error) {
	for dst := range w.boxes {
		box := &w.boxes[dst]
		box.mu.Lock()
		for slot, t := range box.slots {
			owner := dst
			if t.send {
				owner = slot.src
			}
			if err := verdict(owner, t.peer); err != nil {
				delete(box.slots, slot)
				t.finish(err)
			}
		}
		box.mu.Unlock()
	}
}

// mismatch is the error of a transfer whose other end has another size.
func mismatch(t *transfer, peer string, other int) *PeerError {
	word := "sends"
	if t.send {
		word = "receives"
	}
	return &PeerError{
		Rank: t.peer, Name: peer, Op: fmt.Sprintf("%s of %d bytes", t.verb(), len(t.buf)),
		Cause: fmt.Errorf("%w: it %s %d", ErrMismatch, word, other),
	}
}
