package wire

import (
	"fmt"
	"sync"

	"github.com/cprun/cprun/comm/internal/blame"
)

// What an authenticated peer can have this rank remember, over all groups.
const (
	maxNotes   = 1 << 16  // large messages that it offers or accepts
	maxHeld    = 16 << 20 // bytes of memory for messages that nobody has asked for yet
	maxUnknown = 1 << 10  // groups that are not there yet: it may be ahead in making them
)

// debts are what a peer has this rank remember.
type debts struct{ notes, held, unknown int }

// check returns what is too much.
func (d *debts) check() error {
	switch {
	case d.notes > maxNotes:
		return fmt.Errorf("%w: more than %d messages announced", blame.ErrProtocol, maxNotes)
	case d.held > maxHeld:
		return fmt.Errorf("%w: more than %d MiB of messages that nobody has asked for", blame.ErrProtocol, maxHeld>>20)
	case d.unknown > maxUnknown:
		return fmt.Errorf("%w: messages for more than %d groups that are not known here", blame.ErrProtocol, maxUnknown)
	}
	return nil
}

// cost returns what an eager message takes of the window: never nothing, so that even empty ones
// are bounded.
func cost(n int) int { return n + headerSize }

// Buffers for eager messages that come before they are asked for are as large as the messages, or
// about so: those above the first size come from a pool of the next one that fits.
const (
	smallBuffer  = 1 << 10
	mediumBuffer = 4 << 10
)

var (
	mediumPool = sync.Pool{New: func() any { return new([mediumBuffer]byte) }}
	largePool  = sync.Pool{New: func() any { return new([maxEager]byte) }}
)

// takeBuffer returns memory for an eager message.
func takeBuffer(n int) []byte {
	switch {
	case n <= smallBuffer:
		return make([]byte, n)
	case n <= mediumBuffer:
		return mediumPool.Get().(*[mediumBuffer]byte)[:n]
	}
	return largePool.Get().(*[maxEager]byte)[:n]
}

// giveBuffer gives it back.
func giveBuffer(b []byte) {
	switch cap(b) {
	case mediumBuffer:
		mediumPool.Put((*[mediumBuffer]byte)(b[:mediumBuffer]))
	case maxEager:
		largePool.Put((*[maxEager]byte)(b[:maxEager]))
	}
}

// kept returns what an early message takes of this rank's memory, with what it takes to find it.
func kept(b []byte) int { return cap(b) + 2*headerSize }

// announced finds or makes the flow of a frame, which may come ahead of its group. p.mu is held.
func (p *peer) announced(group uint64) (*flow, error) {
	f := p.flows[group]
	if f == nil {
		f = newFlow()
		p.flows[group] = f
		p.debts.unknown++
	}
	return f, p.debts.check()
}

// forget drops a flow and what is kept of it. p.mu is held.
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

// note remembers what the peer has announced of a message. p.mu is held.
func (p *peer) note(in map[uint64]uint64, seq, size uint64) error {
	if _, ok := in[seq]; !ok {
		p.debts.notes++
	}
	in[seq] = size
	return p.debts.check()
}
