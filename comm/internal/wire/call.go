package wire

import (
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"
	"net"
	"slices"
	"syscall"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/pace"
	"github.com/cprun/cprun/comm/internal/shm"
)

// Of two ranks the higher one dials. A lower one that needs a connection calls the higher, from rank
// to rank: each passes the call on to the one of its own connections that is nearest to the called
// rank without going past it. The neighbours at distances of powers of two halve the way with
// each step, so log2 N steps do.
//
// Two calls go out at once, one up through the ranks between the two, and one down around the
// others. No rank is on both ways, so that one which stands still holds up no call. Who calls
// does so again from time to time, since a rank on the way may have left with the call.

// The ways of a call, which is the size of its frame.
const (
	callUp   = 1
	callDown = 2
)

// maxCalls bounds the calls that wait to be passed on to one rank. More are dropped: whoever
// needs the connection calls again.
const maxCalls = 4096

func (s *sockets) call(rank int) {
	for way := range uint64(2) {
		s.pass(header{kind: frameCall, id: link.MsgID{Group: uint64(s.rank), Seq: uint64(rank)}, size: callUp + way})
	}
}

// onCall takes a call, and answers it or passes it on.
func (s *sockets) onCall(h header) error {
	from, to := int(h.id.Group), int(h.id.Seq)
	switch {
	case to >= s.size: // and so is from, which is below it
		return fmt.Errorf("%w: it passes on a call to rank %d of %d", blame.ErrProtocol, to, s.size)
	case to == s.rank:
		if p := s.peer(from); !p.met.Load() {
			s.want(p)
		}
	default:
		s.pass(h)
	}
	return nil
}

// pass sends a call one step further, if there is a way.
func (s *sockets) pass(h header) {
	to := int(h.id.Seq)
	away := func(rank int) int { // how far a rank is from the called one
		if h.size == callUp {
			return (to - rank + s.size) % s.size
		}
		return (rank - to + s.size) % s.size
	}
	var next *peer
	least := away(s.rank)
	for r := range s.peers {
		if p := s.peers[r].Load(); p != nil && p.met.Load() && away(r) < least && !s.roster.hasLeft(r) {
			next, least = p, away(r)
		}
	}
	if next == nil {
		return
	}
	next.mu.Lock()
	defer next.mu.Unlock()
	if len(next.ctrl) < maxCalls {
		next.control(h)
	}
}

// A channel is a connection after the handshake.
type channel struct {
	net.Conn
	rank int
	name string
	in   frameReader
	out  frameWriter

	raw   syscall.RawConn // over TCP, to be watched
	hears hearing         // guarded by peer.mu

	area    *shm.Area // memory that is shared with the other side, or nil
	pipes   *pipes    // that go with it
	placing bool      // guarded by peer.mu; the other side reads from it
	says    bool      // guarded by peer.mu; this side is to say that it does, and goes on in its pipe

	current []*link.Transfer // what the writer is sending, once for each piece; it alone uses this until peer.quiet
}

// channel returns the connection as it is used after the handshake.
func (id *identity) channel(conn net.Conn, own, other *hello) (*channel, error) {
	c := &channel{Conn: conn, rank: other.rank, name: other.name}
	if own.mode == Plain {
		c.in, c.out = newPlainReader(conn), &plainWriter{conn: conn}
		return c, nil
	}
	open, seal, err := id.keys(own, other)
	if err != nil {
		return nil, err
	}
	c.in, c.out = newOpeningReader(conn, open), &sealedWriter{conn: conn, aead: seal}
	return c, nil
}

// keys returns the ciphers of a connection, to read and to write.
func (id *identity) keys(own, other *hello) (open, seal cipher.AEAD, err error) {
	public, err := ecdh.X25519().NewPublicKey(other.fresh[:])
	if err != nil {
		return nil, nil, err
	}
	shared, err := own.key.ECDH(public)
	if err != nil {
		return nil, nil, fmt.Errorf("its key: %w", err)
	}
	own.key = nil // no one needs it any more, and no one is to find it
	dialer, acceptor := own, other
	to, from := "cprun frames to the acceptor", "cprun frames to the dialer"
	if own.rank < other.rank { // this rank is the acceptor
		dialer, acceptor, to, from = other, own, from, to
	}
	salt := sha256.Sum256(slices.Concat(dialer.raw, acceptor.raw))
	cipherOf := func(info string) (cipher.AEAD, error) {
		key, err := hkdf.Key(sha256.New, slices.Concat(shared, id.secret), salt[:], info, 32)
		if err != nil {
			return nil, err
		}
		return newSeal(key)
	}
	if open, err = cipherOf(from); err != nil {
		return nil, nil, err
	}
	seal, err = cipherOf(to)
	return open, seal, err
}

// awaitTaken blocks until the peer's system has acknowledged all bytes of a TCP connection whose write side has
// been shut down, until the connection is lost, or until the given time. After that the peer can read the
// bytes, even if the connection ends. Without the wait, unread or late data from the peer would make this
// system reset the connection when the process exits, and drop undelivered bytes. A Unix socket
// delivers at once, so awaitTaken returns at once.
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
