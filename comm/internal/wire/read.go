package wire

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
)

// readLoop takes what the peer sends on a connection until the end, then waits for the peer to end too,
// so that what was written last is not lost with the connection.
func (p *peer) readLoop(c *channel) {
	defer c.area.Close()
	if err := p.read(c); err != nil {
		if err = p.verdict(c, err); err != nil {
			p.s.Fail(err)
		}
	}
	<-p.stop
	p.quiet.Done()
	c.SetReadDeadline(time.Now().Add(endBound))
	io.Copy(io.Discard, c.Conn)
	c.Close()
}

// read returns nil after a goodbye, and otherwise why the connection has ended.
func (p *peer) read(c *channel) error {
	for {
		h, err := c.in.next()
		if err != nil {
			return err
		}
		switch h.kind {
		case frameData:
			err = p.onData(c.in, h)
		case framePiece:
			err = p.onPiece(c.in, h)
		case framePlaced:
			err = p.onPlaced(c, h)
		case frameShare:
			err = p.onShare(c)
		case frameRoom:
			p.onRoom()
		case frameOffer:
			err = p.onOffer(h)
		case frameAccept:
			err = p.onAccept(h)
		case frameCredit:
			err = p.onCredit(h)
		case frameStatus:
			err = p.onStatus(c.in, h)
		case frameCall:
			err = p.s.onCall(h)
		case frameReady:
			err = fmt.Errorf("%w: it is ready twice", blame.ErrProtocol)
		case frameAbort:
			err = p.onAbort(c.in, h)
		case frameGoodbye:
			return p.onGoodbye()
		}
		if err != nil {
			return err
		}
	}
}

// onAbort returns what the peer ends with.
func (p *peer) onAbort(in frameReader, h header) error {
	note := make([]byte, h.length)
	if err := in.payload(note); err != nil {
		return err
	}
	told, err := decodeNote(note, p.s.size)
	if err != nil {
		return err
	}
	return told
}

// onStatus takes what a rank has said of itself, and passes on news.
func (p *peer) onStatus(in frameReader, h header) error {
	name := make([]byte, h.length)
	if err := in.payload(name); err != nil {
		return err
	}
	rank, s := int(h.id.Group), state{h.id.Seq, h.size}
	switch {
	case rank >= p.s.size:
		return fmt.Errorf("%w: it has heard of rank %d of %d", blame.ErrProtocol, rank, p.s.size)
	case s.seq != lastWord && h.size > uint64(p.s.size):
		return fmt.Errorf("%w: rank %d waits for rank %d of %d", blame.ErrProtocol, rank, h.size-1, p.s.size)
	case !printable(string(name)):
		return fmt.Errorf("%w: a name with characters that cannot be printed", blame.ErrProtocol)
	}
	p.s.learn(rank, s, string(name), p)
	return nil
}

// onGoodbye takes the peer's own word that it leaves, which comes behind all that it has sent.
func (p *peer) onGoodbye() error {
	p.s.learn(p.rank, state{lastWord, leftMark}, p.s.roster.name(p.rank), p)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leave()
}

// expecting returns what waits for the peer. p.mu is held.
func (p *peer) expecting() string {
	for _, f := range p.flows {
		for _, t := range f.posted {
			return t.Op().What
		}
		for _, t := range f.offered {
			return t.Op().What
		}
		for _, t := range f.waiting {
			return t.Op().What
		}
	}
	for _, t := range append(p.small[:len(p.small):len(p.small)], p.large...) {
		return t.Op().What
	}
	return ""
}

// loss returns the cause of a connection that has ended without a word. Over TCP it says where.
func (c *channel) loss(err error) error {
	if c.raw == nil {
		return blame.ErrPeerLost
	}
	var why syscall.Errno
	if errors.As(err, &why) {
		return fmt.Errorf("%v: %v: %w", c.RemoteAddr(), why, blame.ErrPeerLost)
	}
	return fmt.Errorf("%v: %w", c.RemoteAddr(), blame.ErrPeerLost)
}

// verdict returns what the end of a connection means. It is nil where nothing is amiss.
func (p *peer) verdict(c *channel, err error) error {
	var pe *blame.PeerError
	switch {
	case errors.As(err, &pe):
		return err
	case errors.Is(err, blame.ErrProtocol):
		return p.blame("", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.s.roster.hasLeft(p.rank) { // it could not say so here
		return p.leave()
	}
	return p.blame(p.expecting(), c.loss(err))
}
