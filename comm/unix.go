package comm

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cprun/cprun/internal/tensor"
)

// maxSocketPath is what sockaddr_un has room for, less its closing zero.
const maxSocketPath = 107

// ConnectUnix joins the processes of one node over Unix sockets in m.Dir. It returns when
// all ranks are there, or names those that did not come. Calls are ordered against compute;
// nil means a private stream.
//
// Nobody but this user can reach the sockets, so frames are not sealed; the handshake keeps
// apart the jobs of the same user.
func ConnectUnix(ctx context.Context, m Mesh, compute tensor.Stream, opts Options) (*Group, error) {
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("unix mesh: %w", err)
	}
	if err := checkDir(m.Dir); err != nil {
		return nil, fmt.Errorf("unix mesh: %w", err)
	}
	if path := m.socketPath(m.Size - 1); len(path) > maxSocketPath {
		return nil, fmt.Errorf("unix mesh: the socket path %s has %d bytes, the system takes %d: choose a shorter directory", path, len(path), maxSocketPath)
	}
	var ln net.Listener
	if m.Rank < m.Size-1 {
		var err error
		if ln, err = net.Listen("unix", m.socketPath(m.Rank)); err != nil {
			return nil, fmt.Errorf("unix mesh: socket of rank %d (a leftover of the same run is to be removed): %w", m.Rank, err)
		}
		ln = bufferedListener{ln}
	}
	return connect(ctx, m.identity(false), ln, func(ctx context.Context, rank int) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", m.socketPath(rank))
		if err == nil {
			widen(conn)
		}
		return conn, err
	}, compute, opts)
}

// socketPath has the run in it, so that the sockets of an earlier attempt are not met.
func (m *Mesh) socketPath(rank int) string {
	run := sha256.Sum256([]byte(m.RunID))
	return filepath.Join(m.Dir, fmt.Sprintf("%x-%05d.sock", run[:4], rank))
}

// checkDir refuses a directory that another user could put a socket into.
func checkDir(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("socket directory: %w", err)
	}
	owner := -1
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		owner = int(st.Uid)
	}
	switch {
	case !info.IsDir():
		return fmt.Errorf("socket directory %s is not a directory", dir)
	case info.Mode().Perm() != 0o700:
		return fmt.Errorf("socket directory %s has mode %04o: it needs 0700", dir, info.Mode().Perm())
	case owner != os.Geteuid():
		return fmt.Errorf("socket directory %s belongs to user %d, this process to %d", dir, owner, os.Geteuid())
	}
	return nil
}

// socketBuffer is asked for on every connection; the system may give less.
const socketBuffer = 1 << 20

func widen(conn net.Conn) {
	if c, ok := conn.(interface {
		SetReadBuffer(int) error
		SetWriteBuffer(int) error
	}); ok {
		// What the system does not give costs speed only.
		_ = c.SetReadBuffer(socketBuffer)
		_ = c.SetWriteBuffer(socketBuffer)
	}
}

type bufferedListener struct{ net.Listener }

func (l bufferedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		widen(conn)
	}
	return conn, err
}
