package wire

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/shm"
)

// How two ranks of a node come to share memory, and the pieces that go through it. Its descriptor travels
// behind the handshake, so that only who has the job's secret gets or gives one. Where a rank has none to
// give, or cannot take it, all goes over the socket as before.

// ready says the dialer's last word of the handshake, with memory for the two where that can be had.
func (id *identity) ready(c *channel) error {
	if conn, ok := c.Conn.(*net.UnixConn); ok && !id.alone {
		area, err := give(conn)
		if err == nil {
			c.use(area)
			return nil
		}
		id.log(withoutMemory, id.rank, c.rank, err)
	}
	c.out.add(header{kind: frameReady}, nil)
	return c.out.flush()
}

const withoutMemory = "rank %d: all goes over the socket with rank %d: %v"

// give sends a ready frame with new memory, of which it returns this side. A Unix socket takes so little
// whole, or not at all.
func give(conn *net.UnixConn) (*shm.Area, error) {
	area, file, err := shm.New()
	if err != nil {
		return nil, err
	}
	defer file.Close()
	b := make([]byte, headerSize)
	header{kind: frameReady}.encode(b)
	if _, _, err := conn.WriteMsgUnix(b, unix.UnixRights(int(file.Fd())), nil); err != nil {
		area.Close()
		return nil, err
	}
	return area, nil
}

// awaitReady is the acceptor's side of ready.
func (id *identity) awaitReady(c *channel) error {
	conn, ok := c.Conn.(*net.UnixConn)
	var with rights
	if ok && !id.alone {
		with.UnixConn = conn
		c.in = newPlainReader(&with)
	}
	h, err := c.in.next()
	file := with.take()
	if file != nil {
		defer file.Close()
	}
	switch {
	case err != nil:
		return err
	case h.kind != frameReady:
		return fmt.Errorf("%w: its first frame is of type %d", blame.ErrProtocol, h.kind)
	case file == nil:
		return nil
	}
	area, err := shm.Open(file)
	if err != nil {
		id.log(withoutMemory, id.rank, c.rank, err)
		return nil
	}
	c.use(area)
	c.placing = true // the dialer has mapped it ahead of its word
	id.log("rank %d: shares memory with rank %d", id.rank, c.rank)
	return nil
}

// use has the connection's reader and writer go by an area. The caller's share of it becomes the reader's.
func (c *channel) use(area *shm.Area) {
	area.Share()
	c.area = area
	if w, ok := c.out.(*plainWriter); ok {
		w.ring = area.Out
	}
}

// rights reads from a socket, and keeps the descriptor that comes along with what is read first.
type rights struct {
	*net.UnixConn
	taken bool // what comes now is dropped
	files []*os.File
}

func (r *rights) Read(b []byte) (int, error) {
	if r.taken {
		return r.UnixConn.Read(b)
	}
	oob := make([]byte, unix.CmsgSpace(4)) // of one descriptor; the system closes others
	n, have, _, _, err := r.ReadMsgUnix(b, oob)
	messages, _ := unix.ParseSocketControlMessage(oob[:have])
	for i := range messages {
		fds, _ := unix.ParseUnixRights(&messages[i])
		for _, fd := range fds {
			r.files = append(r.files, os.NewFile(uintptr(fd), "memory of another rank"))
		}
	}
	return max(n, 0), err // of an error such as a reset it says -1, which a Reader must not
}

// take returns the descriptor, or nil, and has those that still come dropped.
func (r *rights) take() *os.File {
	r.taken = true
	if len(r.files) == 0 {
		return nil
	}
	for _, f := range r.files[1:] {
		f.Close()
	}
	return r.files[0]
}

// pieceBytes is how many bytes of a large message go at once. p.mu is held.
func (c *channel) pieceBytes() int {
	if c.placing {
		return maxPlaced
	}
	return maxPayload
}

// sendable reports whether the first connection can take a piece of a large message. p.mu is held.
func (p *peer) sendable(c *channel) bool {
	if len(p.large) == 0 || !c.placing {
		return len(p.large) > 0
	}
	t := p.large[0]
	return c.area.Out.Room(min(maxPlaced, len(t.Buf)-t.Moved))
}

// onShare takes the peer's word that it reads from the area.
func (p *peer) onShare(c *channel) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.area == nil || c.placing {
		return fmt.Errorf("%w: it shares memory that it was not given", blame.ErrProtocol)
	}
	c.placing = true
	return nil
}

// onRoom has the writer look again for room in the area.
func (p *peer) onRoom() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.first.Signal()
}

// onPlaced takes a piece out of the area. On the one connection of two ranks of a node pieces of a message
// come in order, so that those that came over the socket, before both sides had the memory, need no more care.
func (p *peer) onPlaced(c *channel, h header) error {
	p.mu.Lock()
	t, err := p.accepted(h)
	p.mu.Unlock()
	switch {
	case err != nil:
		return err
	case c.area == nil:
		return fmt.Errorf("%w: a piece in memory that is not shared", blame.ErrProtocol)
	case len(t.Buf) <= maxEager || h.size != uint64(t.Moved):
		return fmt.Errorf("%w: a piece at %d of a message of %d bytes, of which %d have come", blame.ErrProtocol, h.size, len(t.Buf), t.Moved)
	}
	piece := t.Buf[t.Moved:min(t.Moved+maxPlaced, len(t.Buf))]
	if c.area.In.Take(piece) {
		p.mu.Lock()
		p.control(header{kind: frameRoom})
		p.mu.Unlock()
	}
	p.moved(t, h, len(piece))
	return nil
}
