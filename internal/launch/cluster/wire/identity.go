package wire

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"time"
)

// Identity is an agent's own key pair, made when it starts and never stored: an agent that is started
// again is another one.
type Identity struct {
	cert   tls.Certificate
	public ed25519.PublicKey
}

// NewIdentity makes a key pair.
func NewIdentity() (*Identity, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("key of this agent: %w", err)
	}
	// Nobody looks at the times: the key is what counts, and it is proven by the handshake.
	form := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0),
		NotAfter: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, form, form, public, private)
	if err != nil {
		return nil, fmt.Errorf("certificate of this agent: %w", err)
	}
	return &Identity{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}, public}, nil
}

// Name returns the name of this agent on that host.
func (id *Identity) Name(host string) string { return Name(host, id.public) }

// Name returns the name of the agent on that host with that public key. Who has no such key cannot bear it.
func Name(host string, public ed25519.PublicKey) string {
	sum := sha256.Sum256(public)
	return host + "-" + hex.EncodeToString(sum[:8])
}

// errStranger is the fault of a peer whose certificate is not one of ours.
var errStranger = errors.New("it is no agent of cprun")

// tls returns how this agent speaks TLS, in both roles.
func (id *Identity) tls() *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{id.cert}, MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
		// There is no authority that signs. What follows the handshake proves that the owner of the
		// key has the job's, too.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			_, err := publicKey(s)
			return err
		},
	}
}

// publicKey returns the peer's.
func publicKey(s tls.ConnectionState) (ed25519.PublicKey, error) {
	if len(s.PeerCertificates) != 1 {
		return nil, errStranger
	}
	key, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	if !ok {
		return nil, errStranger
	}
	return key, nil
}
