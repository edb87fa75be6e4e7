package wire

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// maxSocketPath is the length of the longest path in a sockaddr_un, without its final zero.
const maxSocketPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// UnixDir is the private directory in which the ranks of a node have their sockets.
type UnixDir struct {
	dir string
	run [4]byte // in the names, so that the sockets of an earlier attempt are not met
}

// NewUnixDir checks that dir belongs to this user alone, and that its path is short enough for
// the sockets of size ranks.
func NewUnixDir(dir, runID string, size int) (UnixDir, error) {
	u := UnixDir{dir: dir}
	sum := sha256.Sum256([]byte(runID))
	copy(u.run[:], sum[:])
	if err := checkDir(dir); err != nil {
		return u, err
	}
	if path := u.path(size - 1); len(path) > maxSocketPath {
		return u, fmt.Errorf("the socket path %s has %d bytes, the system takes %d: choose a shorter directory", path,
			len(path), maxSocketPath)
	}
	return u, nil
}

// Listen makes the socket of a rank.
func (u UnixDir) Listen(rank int) (Listener, error) {
	ln, err := net.Listen("unix", u.path(rank))
	if err != nil {
		return Listener{}, fmt.Errorf("socket of rank %d (a leftover of the same run is to be removed): %w", rank, err)
	}
	return Listener{bufferedListener{ln}, Plain}, nil
}

// Dial connects to the socket of a rank.
func (u UnixDir) Dial(ctx context.Context, rank int) (net.Conn, Mode, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", u.path(rank))
	if err == nil {
		widen(conn)
	}
	return conn, Plain, err
}

func (u UnixDir) path(rank int) string {
	return filepath.Join(u.dir, fmt.Sprintf("%x-%05d.sock", u.run, rank))
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
	if c, ok := conn.(*net.UnixConn); ok {
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
