package key

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
)

// An Authenticator makes credentials that only processes of this user can read, and that say who made them.
type Authenticator interface {
	// Vouch makes a credential of this process around a payload.
	Vouch(ctx context.Context, payload []byte) (credential []byte, err error)
	// Open returns the payload of a credential, and the user who made it.
	Open(ctx context.Context, credential []byte) (payload []byte, uid int, err error)
}

// The exchange is two messages:
//
//	asks:   A's public key, and a credential around H(job, A's)
//	gives:  B's public key, the sealed key, and a credential around H(job, A's, B's, sealed)
//
// Each side takes a message only with a credential of its own user around the hash of what it has seen, so
// that public keys cannot be changed on the way. What was recorded is worth nothing: the first message leads
// to a key that is sealed for A's, and the second one holds for A's alone.
const (
	magic         = "cprunk1\n"
	publicSize    = 32
	sealedSize    = Size + 16
	maxCredential = 4096
	headSize      = len(magic) + publicSize + 4
)

// message is either of the two; sealed is empty in the first.
type message struct {
	public             []byte
	sealed, credential []byte
}

func (m message) write(w io.Writer) error {
	b := append([]byte(magic), m.public...)
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.sealed)))
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.credential)))
	b = append(append(b, m.sealed...), m.credential...)
	_, err := w.Write(b)
	return err
}

// readMessage reads one that has so many sealed bytes.
func readMessage(r io.Reader, sealed int) (m message, err error) {
	head := make([]byte, headSize)
	if _, err := io.ReadFull(r, head); err != nil {
		return m, err
	}
	rest := head[len(magic)+publicSize:]
	size := int(binary.BigEndian.Uint16(rest[2:]))
	if string(head[:len(magic)]) != magic || int(binary.BigEndian.Uint16(rest)) != sealed || size < 1 || size > maxCredential {
		return m, errors.New("what came is no message of this exchange")
	}
	body := make([]byte, sealed+size)
	if _, err := io.ReadFull(r, body); err != nil {
		return m, err
	}
	return message{public: head[len(magic) : len(magic)+publicSize], sealed: body[:sealed], credential: body[sealed:]}, nil
}

// digest is the hash of parts, with their lengths, as text, which any credential can carry.
func digest(parts ...[]byte) []byte {
	h := sha256.New()
	for _, p := range parts {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(p))))
		h.Write(p)
	}
	return hex.AppendEncode(nil, h.Sum(nil))
}

// asked and given are what the credentials of the two messages hold.
func asked(job string, a []byte) []byte { return digest([]byte(magic+"asks"), []byte(job), a) }
func given(job string, a, b, sealed []byte) []byte {
	return digest([]byte(magic+"gives"), []byte(job), a, b, sealed)
}

// verify checks that a credential is of this user, and around what was seen.
func verify(ctx context.Context, auth Authenticator, uid int, credential, seen []byte) error {
	payload, by, err := auth.Open(ctx, credential)
	switch {
	case err != nil:
		return err
	case by != uid:
		return fmt.Errorf("its credential is of user %d, and this is user %d", by, uid)
	case subtle.ConstantTimeCompare(payload, seen) != 1:
		return errors.New("its credential is for another exchange: it is of another job, or somebody is between")
	}
	return nil
}

// newPair makes the ephemeral key of one exchange.
func newPair() (*ecdh.PrivateKey, error) { return ecdh.X25519().GenerateKey(rand.Reader) }

// sealer encrypts for one exchange, in which it is used once: a nonce of zeros is a new one.
func sealer(own *ecdh.PrivateKey, peer []byte, job string, a, b []byte) (cipher.AEAD, error) {
	public, err := ecdh.X25519().NewPublicKey(peer)
	if err != nil {
		return nil, err
	}
	shared, err := own.ECDH(public)
	if err != nil {
		return nil, err
	}
	secret, err := hkdf.Key(sha256.New, shared, digest([]byte(job), a, b), magic+"seals", 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(secret)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// give answers a first message that was verified: with the key, sealed for the one who asks.
func give(ctx context.Context, auth Authenticator, job string, k Key, a []byte) (m message, err error) {
	own, err := newPair()
	if err != nil {
		return m, err
	}
	b := own.PublicKey().Bytes()
	aead, err := sealer(own, a, job, a, b)
	if err != nil {
		return m, err
	}
	m = message{public: b, sealed: aead.Seal(nil, make([]byte, aead.NonceSize()), k[:], nil)}
	m.credential, err = auth.Vouch(ctx, given(job, a, b, m.sealed))
	return m, err
}

// take opens the second message.
func take(ctx context.Context, auth Authenticator, uid int, job string, own *ecdh.PrivateKey, m message) (k Key, err error) {
	a := own.PublicKey().Bytes()
	if err := verify(ctx, auth, uid, m.credential, given(job, a, m.public, m.sealed)); err != nil {
		return k, err
	}
	aead, err := sealer(own, m.public, job, a, m.public)
	if err != nil {
		return k, err
	}
	plain, err := aead.Open(nil, make([]byte, aead.NonceSize()), m.sealed, nil)
	if err != nil {
		return k, err
	}
	copy(k[:], plain)
	return k, nil
}
