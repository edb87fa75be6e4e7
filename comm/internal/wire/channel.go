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

	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/shm"
)

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

// keys returns the ciphers of a connection for what is read and for what is written.
func (id *identity) keys(own, other *hello) (open, seal cipher.AEAD, err error) {
	public, err := ecdh.X25519().NewPublicKey(other.fresh[:])
	if err != nil {
		return nil, nil, err
	}
	shared, err := own.key.ECDH(public)
	if err != nil {
		return nil, nil, fmt.Errorf("its key: %w", err)
	}
	own.key = nil // nobody needs it any more, and nobody is to find it
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
