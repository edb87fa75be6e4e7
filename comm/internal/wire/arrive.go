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

// onPiece reads a piece of a large message.
func (p *peer) onPiece(in frameReader, h header) error {
	t, piece, err := p.piece(h, maxPayload)
	if err == nil && len(piece) != h.length {
		err = fmt.Errorf("%w: a piece of %d bytes where %d are to come", blame.ErrProtocol, h.length, len(piece))
	}
	if err == nil {
		err = in.payload(piece)
	}
	if err == nil {
		p.moved(t, h, len(piece))
	}
	return err
}

// piece returns the message that a piece belongs to, and the place of its next bytes, at most so many. Pieces of a
// message come in order.
func (p *peer) piece(h header, most int) (*link.Transfer, []byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.flows[h.id.Group]
	if f == nil || f.posted[h.id.Seq] == nil {
		return nil, nil, fmt.Errorf("%w: %d bytes of a message that was not accepted", blame.ErrProtocol, h.length)
	}
	t := f.posted[h.id.Seq]
	if len(t.Buf) <= maxEager || h.size != uint64(t.Moved) {
		return nil, nil, fmt.Errorf("%w: a piece at %d of a message of %d bytes, of which %d have come",
			blame.ErrProtocol, h.size, len(t.Buf), t.Moved)
	}
	return t, t.Buf[t.Moved:min(t.Moved+most, len(t.Buf))], nil
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
