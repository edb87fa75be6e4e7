package wire

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pipes carry the bytes between two ranks that share memory, one each way, in place of the socket of their handshake.
// A poller of a socket wakes whenever the peer reads, and Go polls for both directions, so every message would wake its
// sender. A pipe wakes its writer only after it was full. Its end shows like a socket's.
type pipes struct {
	*net.UnixConn // where all goes up to the word of each side that it goes on here
	in, out       *os.File
	raw           syscall.RawConn // of out
	heard         bool            // the reader's: the other side goes on here
}

// newPipes returns what this side has of two pipes.
func newPipes(conn *net.UnixConn, in, out *os.File) (*pipes, error) {
	for _, f := range []*os.File{in, out} {
		if info, err := f.Stat(); err != nil {
			return nil, err
		} else if info.Mode().Type() != fs.ModeNamedPipe {
			return nil, fmt.Errorf("%v where a pipe was to be", info.Mode().Type())
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

// send writes all of bufs to the other side's pipe, with as few system calls as it has room for.
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
				return false // to be called again when there is room
			}
		}
		return true
	})
	if err == nil {
		err = wait
	}
	return err
}

// after returns what is left of bufs, which it changes, behind n bytes.
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

// CloseWrite says that this side has said all.
func (p *pipes) CloseWrite() error {
	p.out.Close()
	return p.UnixConn.CloseWrite()
}

func (p *pipes) Close() error {
	closeAll(p.in, p.out)
	return p.UnixConn.Close()
}
