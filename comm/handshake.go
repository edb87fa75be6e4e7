package comm

// The handshake, before the first frame. The dialing rank is always the higher one.
//
//	dialer -> acceptor   hello: "CPRUNH1\n", rank (4 bytes), size (4), SHA-256 of the run id
//	                     (32), nonce (32), length of name (1), name
//	acceptor -> dialer   hello
//	dialer -> acceptor   HMAC-SHA256(secret, "cprun dialer" ‖ dialer's hello ‖ acceptor's hello)
//	acceptor -> dialer   HMAC-SHA256(secret, "cprun acceptor" ‖ dialer's hello ‖ acceptor's hello)
//
// Each side proves that it has the secret over both nonces, ranks, sizes, names and the run,
// in its role, so that no proof can be replayed or reflected. The acceptor speaks for itself
// only to a dialer that has proved itself and whose rank is still free; it refuses by closing.
// The keys of a sealed connection are HKDF-SHA256 of the secret, salted with both nonces, one
// for each direction.

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
	"unicode"
)

const (
	helloMagic = "CPRUNH1\n"
	nonceSize  = 32
	maxName    = 255
	helloFixed = len(helloMagic) + 4 + 4 + sha256.Size + nonceSize + 1

	// handshakeBound is how long a stranger can hold a connection open.
	handshakeBound = 10 * time.Second
)

// hello is what a rank says of itself.
type hello struct {
	rank, size int
	run        [sha256.Size]byte
	nonce      [nonceSize]byte
	name       string
	raw        []byte // as it stood on the wire
}

func (h *hello) encode() []byte {
	b := append(make([]byte, 0, helloFixed+len(h.name)), helloMagic...)
	b = binary.BigEndian.AppendUint32(b, uint32(h.rank))
	b = binary.BigEndian.AppendUint32(b, uint32(h.size))
	b = append(b, h.run[:]...)
	b = append(b, h.nonce[:]...)
	b = append(b, byte(len(h.name)))
	return append(b, h.name...)
}

// readHello reads no more than a hello's bytes, and refuses what is none.
func readHello(r io.Reader) (*hello, error) {
	raw := make([]byte, helloFixed, helloFixed+maxName)
	if _, err := io.ReadFull(r, raw[:len(helloMagic)]); err != nil {
		return nil, err
	}
	if string(raw[:len(helloMagic)]) != helloMagic {
		return nil, errors.New("it does not speak this protocol")
	}
	if _, err := io.ReadFull(r, raw[len(helloMagic):]); err != nil {
		return nil, err
	}
	h, b := &hello{}, raw[len(helloMagic):]
	rank, size := binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])
	if size > maxRanks || rank >= size {
		return nil, fmt.Errorf("it says rank %d of %d", rank, size)
	}
	h.rank, h.size = int(rank), int(size)
	copy(h.run[:], b[8:])
	copy(h.nonce[:], b[8+sha256.Size:])
	raw = raw[:helloFixed+int(raw[helloFixed-1])]
	if _, err := io.ReadFull(r, raw[helloFixed:]); err != nil {
		return nil, err
	}
	h.name, h.raw = string(raw[helloFixed:]), raw
	if strings.ContainsFunc(h.name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return nil, errors.New("its name has characters that cannot be printed")
	}
	return h, nil
}

// identity is what a rank knows before it meets another.
type identity struct {
	rank, size int
	run        [sha256.Size]byte
	name       string
	secret     []byte
	sealed     bool
}

func (id *identity) hello() *hello {
	h := &hello{rank: id.rank, size: id.size, run: id.run, name: id.name}
	rand.Read(h.nonce[:]) // never fails, by its documentation
	h.raw = h.encode()
	return h
}

// check refuses a hello that belongs to another job.
func (id *identity) check(h *hello) error {
	switch {
	case h.size != id.size:
		return fmt.Errorf("it belongs to a world of %d ranks, this is one of %d", h.size, id.size)
	case !hmac.Equal(h.run[:], id.run[:]):
		return errors.New("it belongs to another run")
	}
	return nil
}

func (id *identity) proof(role string, dialer, acceptor *hello) []byte {
	m := hmac.New(sha256.New, id.secret)
	m.Write([]byte("cprun " + role))
	m.Write(dialer.raw)
	m.Write(acceptor.raw)
	return m.Sum(nil)
}

var errProof = errors.New("it does not have this job's secret")

// dial is the dialer's side: it meets the rank that it expects, or fails.
func (id *identity) dial(conn net.Conn, want int) (*peer, error) {
	own := id.hello()
	if _, err := conn.Write(own.raw); err != nil {
		return nil, err
	}
	other, err := readHello(conn)
	if err != nil {
		return nil, err
	}
	if err := id.check(other); err != nil {
		return nil, err
	}
	if other.rank != want {
		return nil, fmt.Errorf("it says it is rank %d", other.rank)
	}
	if _, err := conn.Write(id.proof("dialer", own, other)); err != nil {
		return nil, err
	}
	if err := id.verify(conn, "acceptor", own, other); err != nil {
		return nil, err
	}
	return id.peer(conn, other, own, other)
}

// accept is the acceptor's side. reserve takes the rank's place, which is the caller's to
// give back if accept returns an error after it.
func (id *identity) accept(conn net.Conn, reserve func(rank int) bool) (*peer, error) {
	other, err := readHello(conn)
	if err != nil {
		return nil, err
	}
	if err := id.check(other); err != nil {
		return nil, err
	}
	if other.rank <= id.rank {
		return nil, fmt.Errorf("it says it is rank %d, which does not dial rank %d", other.rank, id.rank)
	}
	own := id.hello()
	if _, err := conn.Write(own.raw); err != nil {
		return nil, err
	}
	if err := id.verify(conn, "dialer", other, own); err != nil {
		return nil, err
	}
	if !reserve(other.rank) {
		return nil, fmt.Errorf("rank %d is connected already", other.rank)
	}
	if _, err := conn.Write(id.proof("acceptor", other, own)); err != nil {
		return nil, err
	}
	return id.peer(conn, other, other, own)
}

func (id *identity) verify(conn net.Conn, role string, dialer, acceptor *hello) error {
	var got [sha256.Size]byte
	if _, err := io.ReadFull(conn, got[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("it hung up: its secret or run may differ, or it has this rank already")
		}
		return err
	}
	if !hmac.Equal(got[:], id.proof(role, dialer, acceptor)) {
		return errProof
	}
	return nil
}

// peer is the connection after the handshake.
func (id *identity) peer(conn net.Conn, other, dialer, acceptor *hello) (*peer, error) {
	if !id.sealed {
		return newPeer(nil, other.rank, other.name, conn, newPlainReader(conn), &plainWriter{conn: conn}), nil
	}
	salt := append(dialer.nonce[:], acceptor.nonce[:]...)
	key := func(info string) ([]byte, error) { return hkdf.Key(sha256.New, id.secret, salt, info, 32) }
	out, err := key("cprun frames to the acceptor")
	if err != nil {
		return nil, err
	}
	in, err := key("cprun frames to the dialer")
	if err != nil {
		return nil, err
	}
	if id.rank < other.rank { // this rank is the acceptor
		out, in = in, out
	}
	seal, err := newSeal(out)
	if err != nil {
		return nil, err
	}
	open, err := newSeal(in)
	if err != nil {
		return nil, err
	}
	return newPeer(nil, other.rank, other.name, conn, newSealedReader(conn, open), &sealedWriter{conn: conn, aead: seal}), nil
}
