// Package wire joins processes by sockets: frames and their encryption, flow control, the handshake, connections at the
// start and on first use, and the states of ranks. Connect returns them as a link.Link.
package wire

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	maxRanks  = 1 << 16
	minSecret = 16

	// defaultPairs is the largest world in which all ranks connect with each other: two nodes of eight GPUs. Up to
	// there a barrier in one round takes no longer than one in log2 N, every rank sees every death itself, and all
	// connections of a rank take about 1 MiB.
	defaultPairs = 16
)

// Mode is the form of frames on a connection after the handshake. Both ends must agree: each states it in its hello,
// which the proofs cover, so that no attacker can downgrade a sealed connection to a plain one.
type Mode byte

// The modes.
const (
	Plain  Mode = 'p' // as they are, for Unix sockets, which only this user can reach
	Sealed Mode = 's' // encrypted and authenticated, for TCP
)

func (m Mode) String() string {
	switch m {
	case Plain:
		return "plain"
	case Sealed:
		return "sealed"
	}
	return fmt.Sprintf("mode %d", byte(m))
}

// Config describes a world of processes, and how this rank connects with the others.
type Config struct {
	Rank, Size int
	Secret     []byte // the job's own, at least 16 bytes; its owner can join
	RunID      string // distinguishes runs that share a secret
	Name       string // goes into errors after the rank; "" means the process id

	Timeout time.Duration                    // for the ranks to find each other
	Log     func(format string, args ...any) // reports connections; not nil

	// Pairs is the largest world in which all ranks connect with each other; 0: 16. In a larger world each connects
	// with its neighbours at first, link.Neighbours.
	Pairs int

	// Alone keeps this rank from sharing memory with others of its node: everything uses the sockets.
	Alone bool

	// Listeners take the connections of higher ranks. Connect takes them over.
	Listeners []Listener
	// Dial connects to a lower rank, which may not listen yet. The mesh calls it until the world ends.
	Dial func(ctx context.Context, rank int) (net.Conn, Mode, error)
}

// A Listener accepts connections of ranks, in one Mode.
type Listener struct {
	net.Listener
	Mode Mode
}

// Check returns the faults of ranks, secret and name.
func (c *Config) Check() error {
	var faults []error
	if c.Size < 1 || c.Size > maxRanks || c.Rank < 0 || c.Rank >= c.Size {
		faults = append(faults, fmt.Errorf("rank %d of %d: a rank is from 0 to below the size, at most %d", c.Rank,
			c.Size, maxRanks))
	}
	if len(c.Secret) < minSecret {
		faults = append(faults, fmt.Errorf("secret of %d bytes: it needs at least %d, from crypto/rand", len(c.Secret),
			minSecret))
	}
	if len(c.Name) > maxName {
		faults = append(faults, fmt.Errorf("name of %d bytes: it may have %d", len(c.Name), maxName))
	}
	return errors.Join(faults...)
}

// identity returns this rank's facts for handshakes.
func (c *Config) identity() *identity {
	return &identity{
		rank: c.Rank, size: c.Size, run: sha256.Sum256([]byte(c.RunID)), secret: c.Secret, alone: c.Alone, log: c.Log,
		name: cmp.Or(c.Name, fmt.Sprintf("pid %d", os.Getpid())),
	}
}

// DialTCP connects to a rank's listener on another node.
func DialTCP(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: handshakeBound} // the mesh retries a host that is not up yet
	d.SetMultipathTCP(false)
	return d.DialContext(ctx, "tcp", addr)
}

// ListenTCP listens at a free port of a host: an address or name of this node, of IPv4 or IPv6, with brackets or
// without; "": all addresses.
func ListenTCP(ctx context.Context, host string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false) // the check for silence counts the segments of one path
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	return c.Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
}

// maxSocketPath is the length of the longest path in a sockaddr_un, without its final zero.
const maxSocketPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// UnixDir is the private directory in which the ranks of a node have their sockets.
type UnixDir struct {
	dir string
	run [4]byte // in the names, to avoid sockets of an earlier attempt
}

// NewUnixDir checks that dir belongs to this user alone, and that its path is short enough for the sockets of size
// ranks.
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
		return Listener{}, fmt.Errorf("socket of rank %d (remove it if an earlier process left it): %w", rank, err)
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

// checkDir returns an error for a directory in which another user could create a socket.
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

// socketBuffer is the requested buffer of every Unix socket; the system may give less.
const socketBuffer = 1 << 20

func widen(conn net.Conn) {
	if c, ok := conn.(*net.UnixConn); ok {
		// Smaller buffers only cost speed.
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
