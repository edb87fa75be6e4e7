package wire

import (
	"fmt"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
)

// What comes in of messages, read to where it belongs. p.mu is not held while a connection is read: a
// message that is posted stays so until all of it is there, and nobody else touches it.

// onData reads an eager message.
func (p *peer) onData(in frameReader, h header) error {
	p.mu.Lock()
	f, err := p.announced(h.id.Group)
	var t *link.Transfer
	if err == nil {
		t = f.posted[h.id.Seq]
	}
	p.mu.Unlock()
	switch {
	case err != nil:
		return err
	case t == nil:
		return p.readEarly(in, f, h)
	case len(t.Buf) != h.length:
		return t.Mismatch(p.name(), h.length)
	}
	if err := fillFrom(in, t.Buf); err != nil {
		return err
	}
	p.mu.Lock()
	delete(f.posted, h.id.Seq)
	p.consume(f, h.id.Group, len(t.Buf))
	p.mu.Unlock()
	t.Finish(nil)
	return nil
}

// fillFrom reads the payload of a frame, which may be none.
func fillFrom(in frameReader, dst []byte) error {
	if len(dst) == 0 {
		return nil
	}
	return in.payload(dst)
}

// readEarly keeps an eager message that is not asked for yet.
func (p *peer) readEarly(in frameReader, f *flow, h header) error {
	n := h.length
	b := takeBuffer(n)
	if err := fillFrom(in, b); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.flows[h.id.Group] != f { // the group was closed while it was read
		giveBuffer(b)
		return nil
	}
	if t := f.posted[h.id.Seq]; t != nil { // asked for while it was read
		if len(t.Buf) != n {
			return t.Mismatch(p.name(), n)
		}
		copy(t.Buf, b)
		giveBuffer(b)
		delete(f.posted, h.id.Seq)
		p.consume(f, h.id.Group, n)
		t.Finish(nil)
		return nil
	}
	f.held += cost(n)
	p.debts.held += kept(b)
	if _, twice := f.early[h.id.Seq]; twice || f.held > eagerWindow {
		return fmt.Errorf("%w: eager messages beyond the window of %d bytes, or twice", blame.ErrProtocol, eagerWindow)
	}
	f.early[h.id.Seq] = b
	return p.debts.check()
}

// expectPieces prepares t to be received in pieces.
func expectPieces(t *link.Transfer) {
	words := (len(t.Buf) + maxPayload*64 - 1) / (maxPayload * 64)
	if cap(t.Parts) < words {
		t.Parts = make([]uint64, words)
	}
	t.Parts = t.Parts[:words]
	clear(t.Parts)
}

// onPiece reads a piece of a large message. Others of it may come at the same time, on other connections.
func (p *peer) onPiece(in frameReader, h header) error {
	p.mu.Lock()
	t, err := p.claim(h)
	p.mu.Unlock()
	if err != nil {
		return err
	}
	if err := in.payload(t.Buf[h.size:][:h.length]); err != nil {
		return err
	}
	p.moved(t, h, h.length)
	return nil
}

// moved notes that n more bytes of a message are there, and ends it with the last.
func (p *peer) moved(t *link.Transfer, h header, n int) {
	t.Touch()
	p.mu.Lock()
	t.Moved += n
	done := t.Moved == len(t.Buf)
	if done {
		delete(p.flows[h.id.Group].posted, h.id.Seq)
	}
	p.mu.Unlock()
	if done {
		t.Finish(nil)
	}
}

// accepted returns the message that a piece is of. p.mu is held.
func (p *peer) accepted(h header) (*link.Transfer, error) {
	if f := p.flows[h.id.Group]; f != nil && f.posted[h.id.Seq] != nil {
		return f.posted[h.id.Seq], nil
	}
	return nil, fmt.Errorf("%w: %d bytes of a message that was not accepted", blame.ErrProtocol, h.length)
}

// claim returns the message that a piece is of, and has nobody else bring this piece. p.mu is held.
func (p *peer) claim(h header) (*link.Transfer, error) {
	t, err := p.accepted(h)
	if err != nil {
		return nil, err
	}
	size := uint64(len(t.Buf))
	if size <= maxEager || h.size >= size || uint64(h.length) != min(size-h.size, maxPayload) {
		return nil, fmt.Errorf("%w: %d bytes at %d of a message of %d", blame.ErrProtocol, h.length, h.size, size)
	}
	piece := h.size / maxPayload
	word, bit := &t.Parts[piece/64], uint64(1)<<(piece%64)
	if *word&bit != 0 {
		return nil, fmt.Errorf("%w: bytes at %d of a message twice", blame.ErrProtocol, h.size)
	}
	*word |= bit
	return t, nil
}
