package comm

import (
	"fmt"
	"sync"
)

// flow is what two ranks owe each other in one group. The peer's mutex guards it.
type flow struct {
	// As the sender.
	credit  int                  // what is left of the eager window
	waiting []*transfer          // eager messages that the window has no room for, in order
	offered map[uint64]*transfer // large messages that are not accepted yet
	accepts map[uint64]uint64    // accepted before they were posted here: their sizes

	// As the receiver.
	posted   map[uint64]*transfer
	early    map[uint64][]byte // eager messages that nobody has asked for yet
	offers   map[uint64]uint64 // large ones, by their size
	held     int               // cost of early
	consumed int               // cost of what was taken and not given back yet
}

func newFlow() *flow {
	return &flow{
		credit: eagerWindow, offered: map[uint64]*transfer{}, accepts: map[uint64]uint64{},
		posted: map[uint64]*transfer{}, early: map[uint64][]byte{}, offers: map[uint64]uint64{},
	}
}

// maxNotes bounds what an authenticated peer can have this rank remember.
const maxNotes = 1 << 16

// cost is what an eager message takes of the window: never nothing, so that even empty ones
// are bounded.
func cost(n int) int { return n + headerSize }

// pool keeps buffers for eager messages that come before they are asked for.
var pool = sync.Pool{New: func() any { return new([maxEager]byte) }}

func takeBuffer(n int) []byte { return pool.Get().(*[maxEager]byte)[:n] }

func giveBuffer(b []byte) { pool.Put((*[maxEager]byte)(b[:maxEager])) }

// flow finds or makes the flow of a group.
func (p *peer) flow(group uint64) *flow {
	f := p.flows[group]
	if f == nil {
		f = newFlow()
		p.flows[group] = f
	}
	return f
}

// post starts a transfer with this peer.
func (p *peer) post(t *transfer) {
	p.mu.Lock()
	err, ended := p.start(t)
	p.mu.Unlock()
	if ended {
		t.finish(err)
	}
}

// start reports whether t has ended already.
func (p *peer) start(t *transfer) (err error, ended bool) {
	switch {
	case p.ending:
		return p.s.err(), true
	case p.left && !p.arrived(t): // what it sent before it left is still good
		return p.blame("", ErrPeerLeft), true
	case t.send:
		return p.startSend(t)
	}
	return p.startReceive(t)
}

// arrived reports whether t is a receive whose message is here already. p.mu is held.
func (p *peer) arrived(t *transfer) bool {
	if t.send {
		return false
	}
	_, ok := p.flow(t.id.group).early[t.id.seq]
	return ok
}

func (p *peer) startSend(t *transfer) (err error, ended bool) {
	f := p.flow(t.id.group)
	if len(t.buf) <= maxEager {
		f.waiting = append(f.waiting, t)
		p.release(f)
		return nil, false
	}
	size, ok := f.accepts[t.id.seq]
	if !ok {
		f.offered[t.id.seq] = t
		p.control(header{kind: frameOffer, id: t.id, size: uint64(len(t.buf))})
		return nil, false
	}
	delete(f.accepts, t.id.seq)
	if size != uint64(len(t.buf)) {
		return mismatch(t, p.name, int(size)), true
	}
	p.queue(t)
	return nil, false
}

// release queues eager messages that the window has room for.
func (p *peer) release(f *flow) {
	n := 0
	for _, t := range f.waiting {
		if f.credit < cost(len(t.buf)) {
			break
		}
		f.credit -= cost(len(t.buf))
		p.queue(t)
		n++
	}
	f.waiting = append(f.waiting[:0], f.waiting[n:]...)
}

func (p *peer) startReceive(t *transfer) (err error, ended bool) {
	f := p.flow(t.id.group)
	if b, ok := f.early[t.id.seq]; ok {
		delete(f.early, t.id.seq)
		f.held -= cost(len(b))
		defer giveBuffer(b)
		if len(b) != len(t.buf) {
			return mismatch(t, p.name, len(b)), true
		}
		copy(t.buf, b)
		p.consume(f, t.id.group, len(b))
		return nil, true
	}
	if size, ok := f.offers[t.id.seq]; ok {
		delete(f.offers, t.id.seq)
		if size != uint64(len(t.buf)) {
			return mismatch(t, p.name, int(size)), true
		}
	}
	f.posted[t.id.seq] = t
	if len(t.buf) > maxEager {
		p.control(header{kind: frameAccept, id: t.id, size: uint64(len(t.buf))})
	}
	return nil, false
}

// consume gives the sender its window back, in large steps.
func (p *peer) consume(f *flow, group uint64, n int) {
	f.consumed += cost(n)
	if f.consumed >= eagerWindow/4 {
		p.control(header{kind: frameCredit, id: msgID{group: group}, size: uint64(f.consumed)})
		f.consumed = 0
	}
}

// onOffer, onAccept and onCredit take what the peer says about a flow.
func (p *peer) onOffer(h header) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, err := p.known(h)
	if err != nil {
		return err
	}
	if t, ok := f.posted[h.id.seq]; !ok {
		f.offers[h.id.seq] = h.size
	} else if uint64(len(t.buf)) != h.size {
		return mismatch(t, p.name, int(h.size))
	}
	return nil
}

func (p *peer) onAccept(h header) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, err := p.known(h)
	if err != nil {
		return err
	}
	t, ok := f.offered[h.id.seq]
	if !ok {
		f.accepts[h.id.seq] = h.size
		return nil
	}
	if uint64(len(t.buf)) != h.size {
		return mismatch(t, p.name, int(h.size))
	}
	delete(f.offered, h.id.seq)
	p.queue(t)
	return nil
}

func (p *peer) onCredit(h header) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, err := p.known(h)
	if err != nil {
		return err
	}
	if f.credit += int(h.size); f.credit > eagerWindow {
		return fmt.Errorf("%w: credit of %d bytes that were not sent", ErrProtocol, h.size)
	}
	p.release(f)
	return nil
}

// known is the flow of a frame, if that can still be remembered.
func (p *peer) known(h header) (*flow, error) {
	f := p.flow(h.id.group)
	if len(p.flows) > maxNotes || len(f.offers) > maxNotes || len(f.accepts) > maxNotes {
		return nil, fmt.Errorf("%w: more than %d messages or groups announced", ErrProtocol, maxNotes)
	}
	return f, nil
}

// onData reads a piece of a message to where it belongs.
func (p *peer) onData(h header) error {
	p.mu.Lock()
	f, err := p.known(h)
	if err != nil {
		p.mu.Unlock()
		return err
	}
	t := f.posted[h.id.seq]
	p.mu.Unlock()
	if t == nil {
		return p.readEarly(f, h)
	}
	switch {
	case uint64(len(t.buf)) != h.size:
		return mismatch(t, p.name, int(h.size))
	case t.moved+h.length > len(t.buf):
		return fmt.Errorf("%w: %d bytes of a message of %d", ErrProtocol, t.moved+h.length, len(t.buf))
	}
	if err := p.in.payload(t.buf[t.moved : t.moved+h.length]); err != nil {
		return err
	}
	t.moved += h.length
	t.touch()
	if t.moved < len(t.buf) {
		return nil
	}
	p.mu.Lock()
	delete(f.posted, h.id.seq)
	if len(t.buf) <= maxEager {
		p.consume(f, h.id.group, len(t.buf))
	}
	p.mu.Unlock()
	t.finish(nil)
	return nil
}

// readEarly keeps an eager message that is not asked for yet.
func (p *peer) readEarly(f *flow, h header) error {
	n := h.length
	if h.size > maxEager || uint64(n) != h.size {
		return fmt.Errorf("%w: %d bytes of a message of %d that was not accepted", ErrProtocol, n, h.size)
	}
	b := takeBuffer(n)
	if err := p.in.payload(b); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := f.posted[h.id.seq]; t != nil { // asked for while it was read
		if len(t.buf) != n {
			return mismatch(t, p.name, n)
		}
		copy(t.buf, b)
		giveBuffer(b)
		delete(f.posted, h.id.seq)
		p.consume(f, h.id.group, n)
		t.finish(nil)
		return nil
	}
	f.held += cost(n)
	if _, twice := f.early[h.id.seq]; twice || f.held > eagerWindow {
		return fmt.Errorf("%w: eager messages beyond the window of %d bytes, or twice", ErrProtocol, eagerWindow)
	}
	f.early[h.id.seq] = b
	return nil
}
