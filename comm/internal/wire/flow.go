package wire

import (
	"fmt"
	"sync"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// A flow holds the open messages of two ranks in one group. The peer's mutex guards it.
type flow struct {
	// As the sender.
	credit  int                       // the remainder of the eager window
	waiting []*link.Transfer          // eager messages that the window has no room for, in order
	offered map[uint64]*link.Transfer // large messages that are not accepted yet
	accepts map[uint64]uint64         // accepted before they were posted here: their sizes

	// As the receiver.
	posted   map[uint64]*link.Transfer
	early    map[uint64][]byte // eager messages without a receive yet
	offers   map[uint64]uint64 // large ones, by their size
	held     int               // cost of early
	consumed int               // cost of messages taken since the last credit

	used bool // there is such a group here
}

func newFlow() *flow {
	return &flow{
		credit: eagerWindow, offered: map[uint64]*link.Transfer{}, accepts: map[uint64]uint64{},
		posted: map[uint64]*link.Transfer{}, early: map[uint64][]byte{}, offers: map[uint64]uint64{},
	}
}

// flow returns the flow of an existing group. p.mu is held.
func (p *peer) flow(group uint64) *flow {
	f := p.flows[group]
	switch {
	case f == nil:
		f = newFlow()
		p.flows[group] = f
	case !f.used:
		p.debts.unknown--
	}
	f.used = true
	return f
}

func (p *peer) post(t *link.Transfer) {
	p.mu.Lock()
	err, ended := p.start(t)
	p.mu.Unlock()
	if ended {
		t.Finish(err)
	}
}

// start reports whether t has ended already.
func (p *peer) start(t *link.Transfer) (err error, ended bool) {
	switch {
	case p.ending:
		return p.s.Err(), true
	case p.left && !p.arrived(t): // messages sent before it left are still good
		return p.blame("", blame.ErrPeerLeft), true
	case t.Send:
		return p.startSend(t)
	}
	return p.startReceive(t)
}

// arrived reports whether the message of receive t is here already. p.mu is held.
func (p *peer) arrived(t *link.Transfer) bool {
	if t.Send {
		return false
	}
	_, ok := p.flow(t.ID.Group).early[t.ID.Seq]
	return ok
}

func (p *peer) startSend(t *link.Transfer) (err error, ended bool) {
	f := p.flow(t.ID.Group)
	if len(t.Buf) <= maxEager {
		f.waiting = append(f.waiting, t)
		p.release(f)
		return nil, false
	}
	size, ok := f.accepts[t.ID.Seq]
	if !ok {
		f.offered[t.ID.Seq] = t
		p.control(header{kind: frameOffer, id: t.ID, size: uint64(len(t.Buf))})
		return nil, false
	}
	delete(f.accepts, t.ID.Seq)
	p.debts.notes--
	if size != uint64(len(t.Buf)) {
		return t.Mismatch(p.name(), int(size)), true
	}
	p.queue(t)
	return nil, false
}

// release queues the eager messages that fit the window.
func (p *peer) release(f *flow) {
	n := 0
	for _, t := range f.waiting {
		if f.credit < cost(len(t.Buf)) {
			break
		}
		f.credit -= cost(len(t.Buf))
		p.queue(t)
		n++
	}
	f.waiting = append(f.waiting[:0], f.waiting[n:]...)
}

func (p *peer) startReceive(t *link.Transfer) (err error, ended bool) {
	f := p.flow(t.ID.Group)
	if b, ok := f.early[t.ID.Seq]; ok {
		delete(f.early, t.ID.Seq)
		f.held -= cost(len(b))
		p.debts.held -= kept(b)
		defer giveBuffer(b)
		if len(b) != len(t.Buf) {
			return t.Mismatch(p.name(), len(b)), true
		}
		copy(t.Buf, b)
		p.consume(f, t.ID.Group, len(b))
		return nil, true
	}
	if size, ok := f.offers[t.ID.Seq]; ok {
		delete(f.offers, t.ID.Seq)
		p.debts.notes--
		if size != uint64(len(t.Buf)) {
			return t.Mismatch(p.name(), int(size)), true
		}
	}
	f.posted[t.ID.Seq] = t
	if len(t.Buf) > maxEager {
		p.control(header{kind: frameAccept, id: t.ID, size: uint64(len(t.Buf))})
	}
	return nil, false
}

// consume gives the sender its window back, in large steps.
func (p *peer) consume(f *flow, group uint64, n int) {
	f.consumed += cost(n)
	if f.consumed >= eagerWindow/4 {
		p.control(header{kind: frameCredit, id: link.MsgID{Group: group}, size: uint64(f.consumed)})
		f.consumed = 0
	}
}

// onOffer, onAccept and onCredit handle the peer's frames about a flow.
func (p *peer) onOffer(h header) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, err := p.announced(h.id.Group)
	if err != nil {
		return err
	}
	if t, ok := f.posted[h.id.Seq]; !ok {
		return p.note(f.offers, h.id.Seq, h.size)
	} else if uint64(len(t.Buf)) != h.size {
		return t.Mismatch(p.name(), int(h.size))
	}
	return nil
}

func (p *peer) onAccept(h header) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, err := p.announced(h.id.Group)
	if err != nil {
		return err
	}
	t, ok := f.offered[h.id.Seq]
	if !ok {
		return p.note(f.accepts, h.id.Seq, h.size)
	}
	if uint64(len(t.Buf)) != h.size {
		return t.Mismatch(p.name(), int(h.size))
	}
	delete(f.offered, h.id.Seq)
	p.queue(t)
	return nil
}

func (p *peer) onCredit(h header) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.flows[h.id.Group]
	if f == nil { // the group has been closed since
		return nil
	}
	if f.credit += int(h.size); f.credit > eagerWindow {
		return fmt.Errorf("%w: credit of %d bytes that were not sent", blame.ErrProtocol, h.size)
	}
	p.release(f)
	return nil
}

// Bounds of the memory that an authenticated peer can occupy here, over all groups.
const (
	maxNotes   = 1 << 16  // large messages that it offers or accepts
	maxHeld    = 16 << 20 // bytes of memory for messages that no one has asked for yet
	maxUnknown = 1 << 10  // groups that are not there yet: it may be ahead in making them
)

// debts count the memory that a peer occupies.
type debts struct{ notes, held, unknown int }

// check returns an error if a bound is exceeded.
func (d *debts) check() error {
	switch {
	case d.notes > maxNotes:
		return fmt.Errorf("%w: more than %d messages announced", blame.ErrProtocol, maxNotes)
	case d.held > maxHeld:
		return fmt.Errorf("%w: more than %d MiB of messages without a receive", blame.ErrProtocol, maxHeld>>20)
	case d.unknown > maxUnknown:
		return fmt.Errorf("%w: messages for more than %d unknown groups", blame.ErrProtocol, maxUnknown)
	}
	return nil
}

// cost returns an eager message's part of the window. An empty message also has one, so that their number is bounded.
func cost(n int) int { return n + headerSize }

// Buffers for early eager messages. Small ones have the size of the message, others come from pools of two sizes.
const (
	smallBuffer  = 1 << 10
	mediumBuffer = 4 << 10
)

var (
	mediumPool = sync.Pool{New: func() any { return new([mediumBuffer]byte) }}
	largePool  = sync.Pool{New: func() any { return new([maxEager]byte) }}
)

func takeBuffer(n int) []byte {
	switch {
	case n <= smallBuffer:
		return make([]byte, n)
	case n <= mediumBuffer:
		return mediumPool.Get().(*[mediumBuffer]byte)[:n]
	}
	return largePool.Get().(*[maxEager]byte)[:n]
}

func giveBuffer(b []byte) {
	switch cap(b) {
	case mediumBuffer:
		mediumPool.Put((*[mediumBuffer]byte)(b[:mediumBuffer]))
	case maxEager:
		largePool.Put((*[maxEager]byte)(b[:maxEager]))
	}
}

// kept returns the memory of an early message, with its index entry.
func kept(b []byte) int { return cap(b) + 2*headerSize }

// announced returns the flow of a frame, whose group may not exist here yet. p.mu is held.
func (p *peer) announced(group uint64) (*flow, error) {
	f := p.flows[group]
	if f == nil {
		f = newFlow()
		p.flows[group] = f
		p.debts.unknown++
	}
	return f, p.debts.check()
}

// forget drops a flow and its early messages. p.mu is held.
func (p *peer) forget(group uint64) {
	f := p.flows[group]
	if f == nil {
		return
	}
	delete(p.flows, group)
	p.debts.notes -= len(f.offers) + len(f.accepts)
	for _, b := range f.early {
		p.debts.held -= kept(b)
		giveBuffer(b)
	}
	if !f.used {
		p.debts.unknown--
	}
}

// note records an announcement of the peer. p.mu is held.
func (p *peer) note(in map[uint64]uint64, seq, size uint64) error {
	if _, ok := in[seq]; !ok {
		p.debts.notes++
	}
	in[seq] = size
	return p.debts.check()
}
