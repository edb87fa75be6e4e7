package comm

import (
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// endBound is how long a rank that ends tries to tell a peer so.
const endBound = 500 * time.Millisecond

// peer is the connection to one rank. Two goroutines serve it from attach to the end of the
// transport: one reads, and never waits for anything but the connection, and one writes.
// Because every rank always reads, every write comes to its end.
type peer struct {
	s    *sockets
	rank int
	name string
	conn net.Conn
	in   frameReader
	out  frameWriter

	mu     sync.Mutex
	cond   *sync.Cond       // signals the writer
	flows  map[uint64]*flow // guarded by mu; by group
	ctrl   []header         // guarded by mu; control frames go first
	data   []*transfer      // guarded by mu; messages that may be sent, in turn
	left   bool             // guarded by mu; the peer has said goodbye
	ending bool             // guarded by mu
	last   header           // guarded by mu; what is written at the end
	note   []byte           // guarded by mu; its payload

	stop    chan struct{}  // closed when ending is set
	quiet   sync.WaitGroup // the goroutines that may hold a transfer
	current []*transfer    // what the writer is sending; it alone uses this until quiet
}

func newPeer(s *sockets, rank int, name string, conn net.Conn, in frameReader, out frameWriter) *peer {
	p := &peer{s: s, rank: rank, name: name, conn: conn, in: in, out: out, flows: map[uint64]*flow{}, stop: make(chan struct{})}
	p.cond = sync.NewCond(&p.mu)
	p.quiet.Add(2)
	return p
}

func (p *peer) blame(op string, cause error) *PeerError {
	return &PeerError{Rank: p.rank, Name: p.name, Op: op, Cause: cause}
}

// control queues a frame without payload. p.mu is held.
func (p *peer) control(h header) {
	p.ctrl = append(p.ctrl, h)
	p.cond.Signal()
}

// queue hands a message to the writer. p.mu is held.
func (p *peer) queue(t *transfer) {
	p.data = append(p.data, t)
	p.cond.Signal()
}

// end has the writer send a last frame, and both goroutines stop.
func (p *peer) end(last header, note []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ending {
		return
	}
	p.ending, p.last, p.note = true, last, note
	p.conn.SetReadDeadline(time.Now())
	p.conn.SetWriteDeadline(time.Now().Add(endBound))
	close(p.stop)
	p.cond.Signal()
}

// abandon lists the transfers that have not ended, after quiet.
func (p *peer) abandon() []*transfer {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := append(p.data, p.current...)
	for _, f := range p.flows {
		all = append(all, f.waiting...)
		for _, t := range f.offered {
			all = append(all, t)
		}
		for _, t := range f.posted {
			all = append(all, t)
		}
	}
	p.data, p.current, p.flows = nil, nil, map[uint64]*flow{}
	return all
}

// writeLoop sends what is queued until the end.
func (p *peer) writeLoop() {
	defer p.quiet.Done()
	for p.fill() {
		if err := p.out.flush(); err != nil {
			p.broken()
			return
		}
		p.settle()
	}
	p.out.add(p.last, p.note)
	if p.out.flush() == nil {
		if c, ok := p.conn.(interface{ CloseWrite() error }); ok {
			c.CloseWrite()
		}
	}
}

// broken lets the reader find out why nothing can be written: an abort or a goodbye may lie
// before the end of what the peer has sent. Where it reads nothing, the peer is lost.
func (p *peer) broken() {
	p.mu.Lock()
	if !p.ending {
		p.conn.SetReadDeadline(time.Now().Add(endBound))
	}
	p.mu.Unlock()
	<-p.stop
}

// fill waits for work and adds one batch of frames; it is false at the end. Messages take
// turns piece by piece, so that a large one does not hold up the others.
func (p *peer) fill() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.ctrl) == 0 && len(p.data) == 0 && !p.ending {
		p.cond.Wait()
	}
	if p.ending {
		return false
	}
	frames, bytes := 0, 0
	for ; frames < maxBatch && frames < len(p.ctrl); frames++ {
		p.out.add(p.ctrl[frames], nil)
	}
	p.ctrl = append(p.ctrl[:0], p.ctrl[frames:]...)
	taken := 0
	for ; taken < len(p.data) && frames < maxBatch && bytes < maxPayload; taken++ {
		t := p.data[taken]
		n := min(len(t.buf)-t.moved, maxPayload)
		p.out.add(header{kind: frameData, length: n, id: t.id, size: uint64(len(t.buf))}, t.buf[t.moved:t.moved+n])
		t.moved += n
		p.current = append(p.current, t)
		frames++
		bytes += n
	}
	p.data = append(p.data[:0], p.data[taken:]...)
	return true
}

// settle ends the messages that have been written and queues the others again.
func (p *peer) settle() {
	p.mu.Lock()
	done := p.current[:0]
	for _, t := range p.current {
		t.touch()
		if t.moved == len(t.buf) {
			done = append(done, t)
		} else {
			p.data = append(p.data, t)
		}
	}
	p.current = p.current[:0]
	p.mu.Unlock()
	for _, t := range done {
		t.finish(nil)
	}
}

// readLoop takes what the peer sends until the end, then waits for the peer to end too, so
// that what was written last is not lost with the connection.
func (p *peer) readLoop() {
	err := p.read()
	if err != nil {
		p.s.fail(p.verdict(err))
	}
	<-p.stop
	p.quiet.Done()
	p.conn.SetReadDeadline(time.Now().Add(endBound))
	io.Copy(io.Discard, p.conn)
	p.conn.Close()
}

// read returns nil after a goodbye, and otherwise why the connection has ended.
func (p *peer) read() error {
	for {
		h, err := p.in.next()
		if err != nil {
			return err
		}
		switch h.kind {
		case frameData:
			err = p.onData(h)
		case frameOffer:
			err = p.onOffer(h)
		case frameAccept:
			err = p.onAccept(h)
		case frameCredit:
			err = p.onCredit(h)
		case frameStand:
			if h.size > uint64(p.s.size) {
				err = fmt.Errorf("%w: it waits for rank %d of %d", ErrProtocol, h.size-1, p.s.size)
				break
			}
			p.s.stood[p.rank].Store(int32(h.size))
		case frameAbort:
			note := make([]byte, h.length)
			if err = p.in.payload(note); err == nil {
				var told *PeerError
				if told, err = decodeNote(note, p.s.size); err == nil {
					err = told
				}
			}
		case frameGoodbye:
			return p.onGoodbye()
		}
		if err != nil {
			return err
		}
	}
}

// onGoodbye is in order as long as nothing is expected of the peer.
func (p *peer) onGoodbye() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = true
	if op := p.expecting(); op != "" {
		return p.blame(op, ErrPeerLeft)
	}
	return nil
}

// expecting says what stands waiting for the peer. p.mu is held.
func (p *peer) expecting() string {
	for _, f := range p.flows {
		for _, t := range f.posted {
			return fmt.Sprintf("%s of %d bytes", t.verb(), len(t.buf))
		}
		for _, t := range f.offered {
			return fmt.Sprintf("%s of %d bytes", t.verb(), len(t.buf))
		}
		for _, t := range f.waiting {
			return fmt.Sprintf("%s of %d bytes", t.verb(), len(t.buf))
		}
	}
	for _, t := range p.data {
		return fmt.Sprintf("%s of %d bytes", t.verb(), len(t.buf))
	}
	return ""
}
