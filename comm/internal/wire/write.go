package wire

import (
	"time"

	"github.com/cprun/cprun/comm/internal/link"
)

// A halfCloser can end one direction of a connection; sockets can, net.Pipe cannot.
type halfCloser interface{ CloseWrite() error }

// writeLoop sends what is queued until the end, and ends when the peer can read all of it, also if
// this process exits then.
func (p *peer) writeLoop(c *channel) {
	defer p.quiet.Done()
	defer c.area.Close()
	for p.fill(c) {
		if err := c.out.flush(); err != nil {
			p.broken(c)
			return
		}
		p.settle(c)
	}
	c.out.add(p.last, p.payload)
	if c.out.flush() == nil {
		if half, ok := c.Conn.(halfCloser); ok {
			half.CloseWrite()
		}
		awaitTaken(c.Conn, p.until)
	}
}

// broken lets the reader find out why nothing can be written: an abort or a goodbye may lie
// before the end of what the peer has sent. If it reads nothing, the peer is lost.
func (p *peer) broken(c *channel) {
	p.mu.Lock()
	if !p.ending {
		c.SetReadDeadline(time.Now().Add(endBound))
	}
	p.mu.Unlock()
	<-p.stop
}

// fill waits for work and adds one batch of frames; it is false at the end. What is small goes ahead of what is
// large.
func (p *peer) fill(c *channel) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !c.says && len(p.ctrl) == 0 && len(p.news) == 0 && len(p.small) == 0 && !p.sendable(c) && !p.ending {
		p.work.Wait()
	}
	switch {
	case p.ending:
		return false
	case c.says: // the last word on the socket
		c.says = false
		c.out.add(header{kind: frameShare}, nil)
		return true
	}
	room := maxBatch - 1 // a large message comes on in each batch
	room -= p.addControl(c, room)
	room -= p.addNews(c, room)
	room -= p.addSmall(c, room)
	p.addPieces(c, room+1)
	return true
}

// addControl, addNews and addSmall add up to most frames of their kind, and return how many.
func (p *peer) addControl(c *channel, most int) int {
	n := min(most, len(p.ctrl))
	for _, h := range p.ctrl[:n] {
		c.out.add(h, nil)
	}
	p.ctrl = append(p.ctrl[:0], p.ctrl[n:]...)
	return n
}

func (p *peer) addNews(c *channel, most int) (n int) {
	for rank := range p.news {
		if n == most {
			break
		}
		c.out.add(p.s.roster.status(rank))
		delete(p.news, rank)
		n++
	}
	return n
}

func (p *peer) addSmall(c *channel, most int) int {
	n := min(most, len(p.small))
	for _, t := range p.small[:n] {
		size := len(t.Buf)
		c.out.add(header{kind: frameData, length: size, id: t.ID, size: uint64(size)}, t.Buf)
		c.sending(t, size)
	}
	p.small = append(p.small[:0], p.small[n:]...)
	return n
}

func (c *channel) sending(t *link.Transfer, bytes int) {
	t.Moved += bytes
	t.Flying++
	c.current = append(c.current, t)
}

// addPieces adds pieces of large messages, up to most and up to the bytes of a whole one. Messages take
// turns piece by piece, so that one does not hold up the others.
func (p *peer) addPieces(c *channel, most int) {
	limit := c.pieceBytes()
	for bytes := 0; most > 0 && bytes < limit && len(p.large) > 0; most-- {
		t := p.large[0]
		from := t.Moved
		piece := t.Buf[from:min(from+limit, len(t.Buf))]
		h := header{kind: framePiece, length: len(piece), id: t.ID, size: uint64(from)}
		if c.placing {
			if !c.area.Out.Reserve(len(piece)) {
				break
			}
			h.kind, h.length = framePlaced, 0
		}
		p.large = append(p.large[:0], p.large[1:]...)
		c.out.add(h, piece)
		c.sending(t, len(piece))
		if t.Moved < len(t.Buf) {
			p.large = append(p.large, t)
		}
		bytes += len(piece)
	}
}

// settle ends the messages that have been written.
func (p *peer) settle(c *channel) {
	p.mu.Lock()
	done := c.current[:0]
	for _, t := range c.current {
		t.Touch()
		if t.Flying--; t.Flying == 0 && t.Moved == len(t.Buf) {
			done = append(done, t)
		}
	}
	c.current = c.current[:0]
	p.mu.Unlock()
	for _, t := range done {
		t.Finish(nil)
	}
}
