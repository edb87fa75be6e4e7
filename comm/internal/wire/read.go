package wire

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/pace"
)

// readLoop reads a connection to its end, then waits for the peer's end, so that the last written bytes are not lost.
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

// read returns nil after a goodbye, and otherwise the error that ended the connection.
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
			err = fmt.Errorf("%w: a second ready frame", blame.ErrProtocol)
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

// onAbort returns the peer's final error.
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

// onStatus records the state of a rank, and passes on news.
func (p *peer) onStatus(in frameReader, h header) error {
	name := make([]byte, h.length)
	if err := in.payload(name); err != nil {
		return err
	}
	rank, s := int(h.id.Group), state{h.id.Seq, h.size}
	switch {
	case rank >= p.s.size:
		return fmt.Errorf("%w: a status of rank %d of %d", blame.ErrProtocol, rank, p.s.size)
	case s.seq != lastWord && h.size > uint64(p.s.size):
		return fmt.Errorf("%w: rank %d waits for rank %d of %d", blame.ErrProtocol, rank, h.size-1, p.s.size)
	case !printable(string(name)):
		return fmt.Errorf("%w: a name with characters that cannot be printed", blame.ErrProtocol)
	}
	p.s.learn(rank, s, string(name), p)
	return nil
}

// onGoodbye handles the peer's goodbye, which follows all its messages.
func (p *peer) onGoodbye() error {
	p.s.learn(p.rank, state{lastWord, leftMark}, p.s.roster.name(p.rank), p)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leave()
}

// loss returns the cause of a connection that has ended without a goodbye, over TCP with the address.
func (c *channel) loss(err error) error {
	if c.raw == nil {
		return blame.ErrPeerLost
	}
	if why, ok := errors.AsType[syscall.Errno](err); ok {
		return fmt.Errorf("%v: %v: %w", c.RemoteAddr(), why, blame.ErrPeerLost)
	}
	return fmt.Errorf("%v: %w", c.RemoteAddr(), blame.ErrPeerLost)
}

// verdict interprets the end of a connection; nil: no failure.
func (p *peer) verdict(c *channel, err error) error {
	switch {
	case blame.IsRemote(err):
		return err
	case errors.Is(err, blame.ErrProtocol):
		return p.blame("", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.s.roster.hasLeft(p.rank) { // others have reported it
		return p.leave()
	}
	return p.blame(p.expecting(), c.loss(err))
}

// Incoming messages are read to their destination. The reader does not hold p.mu meanwhile: a posted receive stays
// posted until it is complete, and nothing else touches it.

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
	if err := in.payload(t.Buf); err != nil {
		return err
	}
	p.mu.Lock()
	delete(f.posted, h.id.Seq)
	p.consume(f, h.id.Group, len(t.Buf))
	p.mu.Unlock()
	t.Finish(nil)
	return nil
}

// readEarly keeps an eager message without a posted receive.
func (p *peer) readEarly(in frameReader, f *flow, h header) error {
	n := h.length
	b := takeBuffer(n)
	if err := in.payload(b); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.flows[h.id.Group] != f { // the group was closed while it was read
		giveBuffer(b)
		return nil
	}
	if t := f.posted[h.id.Seq]; t != nil { // posted while it was read
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
		err = fmt.Errorf("%w: a piece of %d bytes, want %d", blame.ErrProtocol, h.length, len(piece))
	}
	if err == nil {
		err = in.payload(piece)
	}
	if err == nil {
		p.moved(t, h, len(piece))
	}
	return err
}

// piece returns the message of a piece, and the destination of its next bytes, at most that many. Pieces of a message
// come in order.
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

// moved records n more bytes of a message, and ends it with the last.
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

// A halfCloser can end one direction of a connection; sockets can, net.Pipe cannot.
type halfCloser interface{ CloseWrite() error }

// writeLoop sends queued frames until the end. It returns when the peer can read all of them, even if this process
// exits then.
func (p *peer) writeLoop(c *channel) {
	defer p.quiet.Done()
	defer c.area.Close()
	for p.fill(c) {
		if err := c.out.flush(); err != nil {
			p.broken(c)
			return
		}
		p.finishWritten(c)
	}
	c.out.add(p.last, p.payload)
	if c.out.flush() == nil {
		if half, ok := c.Conn.(halfCloser); ok {
			half.CloseWrite()
		}
		awaitTaken(c.Conn, p.until)
	}
}

// awaitTaken blocks until the peer's system has acknowledged all bytes of a TCP connection, until the connection is
// lost, or until the given time. The caller has shut down the write side. After that the peer can read the bytes, even
// if the connection ends. Without the wait, unread or late data from the peer would make this system reset the
// connection when the process exits, and drop undelivered bytes. A Unix socket delivers at once, so awaitTaken returns
// at once.
func awaitTaken(conn net.Conn, until time.Time) {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	for look := (pace.Backoff{}); onTheWay(raw) && time.Now().Before(until); {
		look.Wait()
	}
}

// broken lets the reader find the cause of a failed write: the peer may have sent an abort or a goodbye. If nothing can
// be read, the peer is lost.
func (p *peer) broken(c *channel) {
	p.mu.Lock()
	if !p.ending {
		c.SetReadDeadline(time.Now().Add(endBound))
	}
	p.mu.Unlock()
	<-p.stop
}

// fill waits for work and adds one batch of frames, small messages first; false: the end.
func (p *peer) fill(c *channel) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !c.says && len(p.ctrl) == 0 && len(p.news) == 0 && len(p.small) == 0 && !p.sendable(c) && !p.ending {
		p.work.Wait()
	}
	switch {
	case p.ending:
		return false
	case c.says: // the last frame on the socket
		c.says = false
		c.out.add(header{kind: frameShare}, nil)
		return true
	}
	room := maxBatch - 1 // each batch has room for a large message
	room -= p.addControl(c, room)
	room -= p.addNews(c, room)
	room -= p.addSmall(c, room)
	p.addPieces(c, room+1)
	return true
}

// addControl, addNews and addSmall add up to most frames of their kind, and return the number.
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

// addPieces adds pieces of large messages, up to most and up to the bytes of a whole one. Messages take turns piece by
// piece, so that none delays the others.
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

// finishWritten ends the written messages.
func (p *peer) finishWritten(c *channel) {
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
