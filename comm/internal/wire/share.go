package wire

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/shm"
)

// Two ranks of a node share memory and pipes. Their descriptors travel after the handshake, so that only owners of the
// job's secret exchange them. If a rank has none to give, or cannot take them, everything uses the socket.

// ready sends the dialer's last message of the handshake, with shared memory if available.
func (id *identity) ready(c *channel) error {
	if conn, ok := c.Conn.(*net.UnixConn); ok && !id.alone {
		area, own, err := give(conn)
		if err == nil {
			c.use(area, own)
			return nil
		}
		id.log(withoutMemory, id.rank, c.rank, err)
	}
	c.out.add(header{kind: frameReady}, nil)
	return c.out.flush()
}

const withoutMemory = "rank %d: all goes over the socket with rank %d: %v"

// given is the number of descriptors with a ready frame: of the memory, of the pipe that the receiver reads, and of the
// one that it writes.
const given = 3

// give sends a ready frame with new memory and pipes, and returns this side of them. A Unix socket takes so few bytes
// whole or not at all.
func give(conn *net.UnixConn) (*shm.Area, *pipes, error) {
	area, file, err := shm.New()
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	own, theirs, err := makePipes(conn)
	if err != nil {
		area.Close()
		return nil, nil, err
	}
	defer closeAll(theirs...)
	b := make([]byte, headerSize)
	header{kind: frameReady}.encode(b)
	rights, err := rightsTo(append([]*os.File{file}, theirs...))
	if err == nil {
		_, _, err = conn.WriteMsgUnix(b, rights, nil)
	}
	if err != nil {
		closeAll(own.in, own.out)
		area.Close()
		return nil, nil, err
	}
	return area, own, nil
}

// rightsTo returns the control message that carries descriptors. It does not call Fd, which would make this process and
// the other one block in them.
func rightsTo(files []*os.File) ([]byte, error) {
	fds := make([]int, len(files))
	for i, f := range files {
		raw, err := f.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) { fds[i] = int(fd) })
		}
		if err != nil {
			return nil, err
		}
	}
	return unix.UnixRights(fds...), nil
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
	files := with.take()
	if err == nil && h.kind != frameReady {
		err = fmt.Errorf("%w: its first frame is of type %d", blame.ErrProtocol, h.kind)
	}
	if err != nil || len(files) == 0 {
		closeAll(files...)
		return err
	}
	area, own, err := take(conn, files)
	if err != nil {
		closeAll(files...)
		id.log(withoutMemory, id.rank, c.rank, err)
		return nil
	}
	c.use(area, own)
	c.placing, c.says = true, true // the dialer has mapped it before its ready frame
	id.log("rank %d: shares memory with rank %d", id.rank, c.rank)
	return nil
}

// take returns this side of the files from give. On error the caller keeps them.
func take(conn *net.UnixConn, files []*os.File) (*shm.Area, *pipes, error) {
	if len(files) != given {
		return nil, nil, fmt.Errorf("%d descriptors, not %d", len(files), given)
	}
	own, err := newPipes(conn, files[1], files[2])
	if err != nil {
		return nil, nil, err
	}
	area, err := shm.Open(files[0])
	if err != nil {
		return nil, nil, err
	}
	files[0].Close()
	return area, own, nil
}

// use makes the connection's reader and writer use an area and pipes. The caller's share of the area becomes the
// reader's.
func (c *channel) use(area *shm.Area, own *pipes) {
	area.Share()
	c.area, c.pipes, c.Conn = area, own, own
	if w, ok := c.out.(*plainWriter); ok {
		w.ring, w.pipes = area.Out, own
	}
}

// A rights value reads from a socket, and keeps the descriptors that arrive with the first bytes.
type rights struct {
	*net.UnixConn
	taken bool // later ones are dropped
	files []*os.File
}

func (r *rights) Read(b []byte) (int, error) {
	if r.taken {
		return r.UnixConn.Read(b)
	}
	oob := make([]byte, unix.CmsgSpace(4*given)) // the system closes others
	n, have, _, _, err := r.ReadMsgUnix(b, oob)
	messages, _ := unix.ParseSocketControlMessage(oob[:have])
	for i := range messages {
		fds, _ := unix.ParseUnixRights(&messages[i])
		for _, fd := range fds {
			_ = unix.SetNonblock(fd, true) // a read of a blocking pipe could not be ended
			r.files = append(r.files, os.NewFile(uintptr(fd), "shared with another rank"))
		}
	}
	return max(n, 0), err // n is -1 after an error such as a reset
}

// take returns the descriptors; later ones are dropped.
func (r *rights) take() []*os.File {
	r.taken = true
	return r.files
}

// pieceBytes returns the size of a piece of a large message. p.mu is held.
func (c *channel) pieceBytes() int {
	if c.placing {
		return maxPlaced
	}
	return maxPayload
}

// sendable reports whether the connection can take a piece of a large message. p.mu is held.
func (p *peer) sendable(c *channel) bool {
	if len(p.large) == 0 || !c.placing {
		return len(p.large) > 0
	}
	t := p.large[0]
	return c.area.Out.Room(min(maxPlaced, len(t.Buf)-t.Moved))
}

// onShare handles the peer's announcement that it reads from the area, and continues in its pipe. The dialer gets it
// first, and answers in kind.
func (p *peer) onShare(c *channel) error {
	if c.pipes == nil || c.pipes.heard || !c.in.(*plainReader).drained() {
		return fmt.Errorf("%w: it shares memory that it was not given, or goes on in the socket", blame.ErrProtocol)
	}
	c.pipes.heard = true
	c.in = newPlainReader(c.pipes)
	p.mu.Lock()
	defer p.mu.Unlock()
	if !c.placing {
		c.placing, c.says = true, true
		p.work.Signal()
	}
	return nil
}

func (p *peer) onRoom() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.work.Signal()
}

// onPlaced takes a piece out of the area. Pieces that came over the socket, before both sides had the memory, need no
// more care.
func (p *peer) onPlaced(c *channel, h header) error {
	if c.area == nil {
		return fmt.Errorf("%w: a piece in memory that is not shared", blame.ErrProtocol)
	}
	t, piece, err := p.piece(h, maxPlaced)
	if err != nil {
		return err
	}
	if c.area.In.Take(piece) {
		p.mu.Lock()
		p.control(header{kind: frameRoom})
		p.mu.Unlock()
	}
	p.moved(t, h, len(piece))
	return nil
}

// pipes carry the bytes between two ranks that share memory, one each way, in place of the socket of their handshake. A
// poller of a socket wakes whenever the peer reads, and Go polls for both directions, so every message would wake its
// sender. A pipe wakes its writer only after it was full. Its end shows like a socket's.
type pipes struct {
	*net.UnixConn // carries everything before the share frames
	in, out       *os.File
	raw           syscall.RawConn // of out
	heard         bool            // the reader's: the other side uses the pipe
}

// newPipes returns this side of two pipes.
func newPipes(conn *net.UnixConn, in, out *os.File) (*pipes, error) {
	for _, f := range []*os.File{in, out} {
		if info, err := f.Stat(); err != nil {
			return nil, err
		} else if info.Mode().Type() != fs.ModeNamedPipe {
			return nil, fmt.Errorf("a descriptor of mode %v in place of a pipe", info.Mode().Type())
		}
	}
	raw, err := out.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &pipes{UnixConn: conn, in: in, out: out, raw: raw}, nil
}

// makePipes returns this side of two new pipes, and the read and write ends for the other side, which the caller
// closes.
func makePipes(conn *net.UnixConn) (own *pipes, theirs []*os.File, err error) {
	read, out, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	in, write, err := os.Pipe()
	if err != nil {
		closeAll(read, out)
		return nil, nil, err
	}
	if own, err = newPipes(conn, in, out); err != nil {
		closeAll(read, out, in, write)
		return nil, nil, err
	}
	return own, []*os.File{read, write}, nil
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// Read reads from the peer's current channel.
func (p *pipes) Read(b []byte) (int, error) {
	if p.heard {
		return p.in.Read(b)
	}
	return p.UnixConn.Read(b)
}

// send writes all of bufs to the other side's pipe, with as few system calls as possible.
func (p *pipes) send(bufs net.Buffers) (err error) {
	wait := p.raw.Write(func(fd uintptr) bool {
		for len(bufs) > 0 && err == nil {
			var n int
			switch n, err = unix.Writev(int(fd), bufs); err {
			case nil:
				bufs = after(bufs, n)
			case unix.EINTR:
				err = nil
			case unix.EAGAIN:
				err = nil
				return false // Write calls again when there is room
			}
		}
		return true
	})
	if err == nil {
		err = wait
	}
	return err
}

// after returns bufs without the first n bytes. It changes bufs.
func after(bufs net.Buffers, n int) net.Buffers {
	for len(bufs) > 0 && n >= len(bufs[0]) {
		n -= len(bufs[0])
		bufs = bufs[1:]
	}
	if n > 0 {
		bufs[0] = bufs[0][n:]
	}
	return bufs
}

func (p *pipes) SetReadDeadline(t time.Time) error {
	p.in.SetReadDeadline(t)
	return p.UnixConn.SetReadDeadline(t)
}

func (p *pipes) SetWriteDeadline(t time.Time) error {
	p.out.SetWriteDeadline(t)
	return p.UnixConn.SetWriteDeadline(t)
}

// CloseWrite ends this side's output.
func (p *pipes) CloseWrite() error {
	p.out.Close()
	return p.UnixConn.CloseWrite()
}

func (p *pipes) Close() error {
	closeAll(p.in, p.out)
	return p.UnixConn.Close()
}
