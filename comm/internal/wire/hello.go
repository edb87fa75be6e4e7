package wire

import (
	"crypto/ecdh"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"
)

const (
	helloMagic = "CPRUNH5\n"
	freshSize  = 32 // that of an X25519 public key
	maxName    = 255

	// Where in a hello its parts begin.
	helloRank  = len(helloMagic)
	helloRun   = helloRank + 4 + 4
	helloFresh = helloRun + sha256.Size
	helloMode  = helloFresh + freshSize
	helloFixed = helloMode + 2 // up to the name
)

// A hello is what a rank says of itself.
type hello struct {
	mode       Mode
	rank, size int
	run        [sha256.Size]byte
	fresh      [freshSize]byte
	name       string
	raw        []byte           // as it stood on the wire
	key        *ecdh.PrivateKey // of fresh, in an own hello that is not plain
}

func (h *hello) encode() []byte {
	b := append(make([]byte, 0, helloFixed+len(h.name)+sha256.Size), helloMagic...)
	b = binary.BigEndian.AppendUint32(b, uint32(h.rank))
	b = binary.BigEndian.AppendUint32(b, uint32(h.size))
	b = append(b, h.run[:]...)
	b = append(b, h.fresh[:]...)
	b = append(b, byte(h.mode), byte(len(h.name)))
	return append(b, h.name...)
}

// readHello reads no more than a hello's bytes, and refuses what is none.
func (id *identity) readHello(r io.Reader) (*hello, error) {
	raw := make([]byte, helloFixed, helloFixed+maxName+sha256.Size)
	if _, err := io.ReadFull(r, raw[:helloRank]); err != nil {
		return nil, err
	}
	if string(raw[:helloRank]) != helloMagic {
		return nil, errors.New("it does not speak this protocol")
	}
	if _, err := io.ReadFull(r, raw[helloRank:]); err != nil {
		return nil, err
	}
	h := &hello{}
	if err := h.fixed(raw); err != nil {
		return nil, err
	}
	raw = raw[:helloFixed+int(raw[helloFixed-1])]
	if _, err := io.ReadFull(r, raw[helloFixed:]); err != nil {
		return nil, err
	}
	h.name = string(raw[helloFixed:])
	code := raw[len(raw) : len(raw)+sha256.Size]
	if _, err := io.ReadFull(r, code); err != nil {
		return nil, err
	}
	if !hmac.Equal(code, id.code(raw)) {
		return nil, errProof
	}
	h.raw = raw[:len(raw)+sha256.Size]
	if !printable(h.name) {
		return nil, errors.New("its name has characters that cannot be printed")
	}
	return h, nil
}

// fixed takes the parts of a hello that stand at fixed places.
func (h *hello) fixed(raw []byte) error {
	rank, size := binary.BigEndian.Uint32(raw[helloRank:]), binary.BigEndian.Uint32(raw[helloRank+4:])
	if size > maxRanks || rank >= size {
		return fmt.Errorf("it says rank %d of %d", rank, size)
	}
	h.rank, h.size = int(rank), int(size)
	copy(h.run[:], raw[helloRun:])
	copy(h.fresh[:], raw[helloFresh:])
	h.mode = Mode(raw[helloMode])
	return nil
}

// printable reports whether a name can go into errors as it is.
func printable(name string) bool {
	return !strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

// hello returns what this rank says on a connection.
func (id *identity) hello(mode Mode) (*hello, error) {
	h := &hello{mode: mode, rank: id.rank, size: id.size, run: id.run, name: id.name}
	if mode == Plain {
		rand.Read(h.fresh[:]) // never fails, by its documentation
	} else {
		key, err := ecdh.X25519().GenerateKey(rand.Reader)
		if err != nil {
			return nil, err
		}
		h.key = key
		copy(h.fresh[:], key.PublicKey().Bytes())
	}
	h.raw = h.encode()
	h.raw = append(h.raw, id.code(h.raw)...)
	return h, nil
}

// code returns what stands at the end of a hello.
func (id *identity) code(hello []byte) []byte {
	m := hmac.New(sha256.New, id.secret)
	m.Write([]byte("cprun hello"))
	m.Write(hello)
	return m.Sum(nil)
}
