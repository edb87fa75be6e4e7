package comm

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/tensor"
)

// Wait is a pending call of a group, with its open messages.
type Wait struct {
	Op    string // "all-reduce"
	Label string // of the compute stream at the call: "step 7/forward/layer 3/hop 2 owner 1"; "" for none
	Group uint64 // the group's number, the same on all its ranks
	Via   string // the carrier of its data other than the host: "nccl", "copy"
	Call  uint64 // the call's number among this rank's calls by that carrier in the group, from 1
	// Begun means that the earlier calls and the work before it have ended.
	Begun bool
	// Needed means that the compute stream waits for the call. Groups of devices do not know how far that stream has
	// come, and set it for every call after its Pending.Wait; copy engines set it for every begun call. Called means
	// that a caller of Pending.Sync waits.
	Needed, Called bool
	// Open lists the posted messages that have not ended, the one without progress for longest first; More counts the
	// rest. A begun call without open messages waits for work of this rank.
	Open []Open
	More int
	// Vague means that Open names all participants, since it is not known which have come.
	Vague bool
	Bytes int64     // of all open messages
	Since time.Time // of the last progress; zero without an open message
}

// Open is a posted message that has not ended.
type Open struct {
	Peer  int // world rank
	Send  bool
	Bytes int64     // 0 if only the call is known
	Since time.Time // of the last progress
}

const (
	// MaxWaits bounds the reported calls of a group, besides the needed ones.
	MaxWaits = 16
	// MaxOpen bounds the reported messages of a call: those with every other rank of a small group, and with every
	// neighbour in a large one.
	MaxOpen = 64
)

// A ledger records a group's pending calls.
type ledger struct {
	mu    sync.Mutex
	calls []*pending      // guarded by mu; in order, in which they also end
	made  uint64          // guarded by mu; calls so far
	open  []link.Transfer // guarded by mu; posted by the first call, until all have ended
	ended []Wait          // guarded by mu; the waits when the world failed
	over  bool            // guarded by mu; the world has failed
}

// add records a call.
func (l *ledger) add(p *pending) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made++
	p.number = l.made
	l.calls = append(l.calls, p)
}

// remove drops the first call, which has ended.
func (l *ledger) remove() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over { // else keep the calls of that time
		l.calls[0] = nil
		l.calls = l.calls[1:]
	}
}

// post records the messages of the first call. Until clear, nothing else writes the fields that Waits reads.
func (l *ledger) post(xs []link.Transfer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = xs
	if len(l.calls) > 0 {
		l.calls[0].begun = true
	}
}

// clear drops the messages, which have ended.
func (l *ledger) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = nil
}

// Waits returns the pending calls of this group and of all split from it. After the world has failed, it returns the
// calls that were pending then. Any goroutine may call it.
func (g *Group) Waits() []Wait {
	all := g.ledger.waits(g)
	g.mu.Lock()
	children := slices.Clone(g.children)
	g.mu.Unlock()
	for _, c := range children {
		all = append(all, c.Waits()...)
	}
	return all
}

// keepWaits freezes the result of Waits, since a failure of the world ends all waits.
func (g *Group) keepWaits() {
	now := g.ledger.waits(g)
	g.ledger.mu.Lock()
	defer g.ledger.mu.Unlock()
	if !g.ledger.over {
		g.ledger.over, g.ledger.ended = true, now
	}
}

// waits lists the pending calls of g.
func (l *ledger) waits(g *Group) (all []Wait) {
	var at tensor.Event // the event that the compute stream waits for
	if s, ok := g.compute.(interface{ At() (tensor.Work, bool) }); ok {
		w, _ := s.At()
		at = w.For
	}
	g.mu.Lock() // no call is being made
	defer g.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return slices.Clone(l.ended)
	}
	for i, p := range l.calls {
		needed, called := at != nil && at == p.event, p.callers.Load() > 0
		if i >= MaxWaits && !needed && !called {
			continue
		}
		w := Wait{Op: p.name, Label: p.label, Group: g.id, Call: p.number, Begun: p.begun, Needed: needed,
			Called: called}
		if i == 0 && p.begun {
			w.measure(l.open)
		}
		all = append(all, w)
	}
	return all
}

// measure sets w's messages. A message that has ended in an error counts as open: the failure of the world ended it.
func (w *Wait) measure(xs []link.Transfer) {
	now := time.Now()
	for i := range xs {
		x := &xs[i]
		if x.Ended() && x.Err() == nil {
			continue
		}
		w.Bytes += int64(len(x.Buf))
		w.Open = append(w.Open, Open{Peer: x.Peer, Send: x.Send, Bytes: int64(len(x.Buf)),
			Since: now.Add(-x.Stood())})
	}
	slices.SortStableFunc(w.Open, func(a, b Open) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Peer, b.Peer))
	})
	if len(w.Open) > 0 {
		w.Since = w.Open[len(w.Open)-1].Since
	}
	w.More = max(len(w.Open)-MaxOpen, 0)
	w.Open = w.Open[:len(w.Open)-w.More]
}

// An entry is the ledger's part of a call.
type entry struct {
	number  uint64 // of the call
	label   string
	callers atomic.Int32 // of Sync that wait
	begun   bool         // guarded by the ledger's mu
}
