// Package wire connects the agents of a job with authenticated streams of messages. A Link is a connection: TLS 1.3
// between self-made keys, a proof on both sides of the job's key, bounded frames, and keepalives.
//
//	config := &wire.Config{Identity: id, Job: "7", Key: key, Hello: hello, Check: check, Silence: 5 * time.Second}
//	acceptor := wire.Open(listener, config, func(l *wire.Link) { … }, func(err error) { … })
//	link, err := wire.Dial(ctx, conn, config)
package wire

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"
)

// Config describes an agent for the handshake.
type Config struct {
	Identity *Identity
	Job      string
	Key      []byte
	// Hello returns this agent's description for peers that have proved the key: at most 12 KiB.
	Hello func() []byte
	// Check validates a peer's hello. An error refuses the peer and is sent to it.
	Check func(from net.Addr, key ed25519.PublicKey, hello []byte) error
	// Silence is the time without a message or keepalive after which a peer is lost.
	Silence time.Duration
}

// HandshakeTimeout bounds a handshake.
const HandshakeTimeout = 5 * time.Second

// Refusal is the error of a handshake that one side refuses.
type Refusal struct {
	Peer   string // its address
	Text   string
	Theirs bool // the peer refused this agent
	Proven bool // after it had proved the key
	Both   bool // both agents dialed, and the other connection stays
}

func (r *Refusal) Error() string {
	if r.Theirs {
		return fmt.Sprintf("the agent at %s refuses this node: %s", r.Peer, r.Text)
	}
	return fmt.Sprintf("refused the agent at %s: %s", r.Peer, r.Text)
}

// ErrSelf is the error of an agent's handshake with itself.
var ErrSelf = errors.New("this agent dialed itself")

// ErrBoth is the error of Check if two agents dial each other at the same time. It ends one of the two connections.
var ErrBoth = errors.New("both agents dialed each other")

// A greeting is a frame of the handshake. After TLS, the dialer sends its proof, then the acceptor. Then each sends its
// hello, and the dialer confirms. A side that refuses sends the reason instead and closes the connection.
type greeting struct {
	Job     string          `json:"job,omitempty"`
	Proof   []byte          `json:"proof,omitempty"`
	Hello   json.RawMessage `json:"hello,omitempty"`
	Refused string          `json:"refused,omitempty"`
	Both    bool            `json:"both,omitempty"`
}

// The roles. A proof contains its sender's role, so that it cannot be reflected.
const (
	dialer   = "dials"
	acceptor = "accepts"
)

// Dial performs the dialer's side of the handshake. It closes conn on failure.
func Dial(ctx context.Context, conn net.Conn, p *Config) (*Link, error) {
	return p.handshake(ctx, tls.Client(conn, p.Identity.tls()), dialer, acceptor)
}

// Accept performs the acceptor's side of the handshake. It closes conn on failure.
func Accept(ctx context.Context, conn net.Conn, p *Config) (*Link, error) {
	return p.handshake(ctx, tls.Server(conn, p.Identity.tls()), acceptor, dialer)
}

func (p *Config) handshake(ctx context.Context, conn *tls.Conn, mine, theirs string) (*Link, error) {
	ctx, cancel := context.WithTimeout(ctx, HandshakeTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.NetConn().Close() })
	l, err := p.exchange(ctx, conn, mine, theirs)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.NetConn().Close()
		if refusal := (*Refusal)(nil); !errors.As(err, &refusal) {
			err = fmt.Errorf("agent at %s: handshake: %w", conn.RemoteAddr(), cmp.Or(context.Cause(ctx), err))
		}
		return nil, err
	}
	return newLink(conn, l, p.Silence), nil
}

// A peer has proved its key and described itself.
type peer struct {
	key   ed25519.PublicKey
	hello []byte
}

func (p *Config) exchange(ctx context.Context, conn *tls.Conn, mine, theirs string) (peer, error) {
	if err := conn.HandshakeContext(ctx); err != nil {
		return peer{}, err
	}
	state := conn.ConnectionState()
	key, err := publicKey(state)
	if err != nil {
		return peer{}, err
	}
	if key.Equal(p.Identity.public) {
		return peer{}, ErrSelf
	}
	s := handshake{p, conn, state, conn.RemoteAddr().String()}
	if mine == acceptor { // without the dialer's random port, so that repeated log lines are equal
		s.from, _, _ = net.SplitHostPort(s.from)
	}
	var got greeting
	steps := []func() error{
		func() error { return s.send(greeting{Job: p.Job, Proof: p.proof(state, mine, p.Job)}) },
		func() error { return s.receive(&got, false, func() error { return p.verify(state, theirs, &got) }) },
		func() error { return s.send(greeting{Hello: p.Hello()}) },
		func() error {
			return s.receive(&got, true, func() error { return p.Check(conn.RemoteAddr(), key, got.Hello) })
		},
	}
	// The dialer sends first and last.
	order := []int{0, 1, 2, 3}
	if mine == acceptor {
		order = []int{1, 0, 3, 2}
	}
	for _, i := range order {
		if err := steps[i](); err != nil {
			return peer{}, err
		}
	}
	var yes greeting
	if mine == dialer {
		err = s.send(greeting{})
	} else {
		err = s.receive(&yes, true, func() error { return nil })
	}
	return peer{key, got.Hello}, err
}

// proof returns an HMAC that proves the job's key for this connection and role only.
func (p *Config) proof(state tls.ConnectionState, role, job string) []byte {
	bound, err := state.ExportKeyingMaterial("EXPORTER-cprun-agents", nil, 32)
	if err != nil {
		return nil // never in TLS 1.3; verify refuses it
	}
	key, err := hkdf.Key(sha256.New, p.Key, nil, "cprun agents: proof of the key", 32)
	if err != nil {
		return nil
	}
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s\x00%d\x00%s\x00", role, len(job), job)
	mac.Write(bound)
	return mac.Sum(nil)
}

func (p *Config) verify(state tls.ConnectionState, role string, g *greeting) error {
	want := p.proof(state, role, g.Job)
	switch {
	case len(want) == 0 || !hmac.Equal(want, g.Proof):
		return errors.New("the keys of the two differ: give all nodes the same key file, by CPRUN_KEY_FILE or " +
			"by a shared --run-dir")
	case g.Job != p.Job:
		return fmt.Errorf("it belongs to job %q, this agent to job %q", g.Job, p.Job)
	}
	return nil
}

type handshake struct {
	*Config
	conn  *tls.Conn
	state tls.ConnectionState
	from  string // the peer's address
}

func (s *handshake) send(g greeting) error {
	message, err := json.Marshal(g)
	if err != nil {
		return err
	}
	f, err := NewFrame(message)
	if err != nil {
		return err
	}
	_, err = s.conn.Write(f)
	return err
}

// receive reads a greeting and checks it. The peer also gets check's error.
func (s *handshake) receive(g *greeting, proven bool, check func() error) error {
	if err := readGreeting(s.conn, g); err != nil {
		return err
	}
	if g.Refused != "" {
		return &Refusal{Peer: s.from, Text: clean(g.Refused), Theirs: true, Proven: proven, Both: g.Both}
	}
	if fault := check(); fault != nil {
		both := errors.Is(fault, ErrBoth)
		s.send(greeting{Refused: fault.Error(), Both: both}) // best effort
		return &Refusal{Peer: s.from, Text: clean(fault.Error()), Proven: proven, Both: both}
	}
	return nil
}

func readGreeting(r io.Reader, g *greeting) error {
	message, err := readFrame(r, maxGreeting)
	if err != nil {
		return err
	}
	*g = greeting{}
	dec := json.NewDecoder(bytes.NewReader(message))
	dec.DisallowUnknownFields()
	if err := dec.Decode(g); err != nil {
		return fmt.Errorf("greeting: %w", err)
	}
	return nil
}

// clean fits a peer's text into one line of a message.
func clean(text string) string {
	const most = 512
	out := make([]rune, 0, min(len(text), most))
	for _, r := range text {
		if len(out) == most {
			break
		}
		if r < ' ' || r == 0x7f {
			r = ' '
		}
		out = append(out, r)
	}
	return string(out)
}

// Identity is an agent's key pair, made at its start and never stored. A restarted agent has another one.
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
	// The times are not checked: the handshake proves the key.
	form := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0),
		NotAfter: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, form, form, public, private)
	if err != nil {
		return nil, fmt.Errorf("certificate of this agent: %w", err)
	}
	return &Identity{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}, public}, nil
}

// Name returns this agent's name on that host.
func (id *Identity) Name(host string) string { return Name(host, id.public) }

// Name returns the name of the agent on that host with that public key. No agent without the key can use it.
func Name(host string, public ed25519.PublicKey) string {
	sum := sha256.Sum256(public)
	return host + "-" + hex.EncodeToString(sum[:8])
}

// tls returns this agent's TLS configuration, for both roles.
func (id *Identity) tls() *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{id.cert}, MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
		// There is no certificate authority. The greetings after the TLS handshake prove that the key's owner also has
		// the job's key.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			_, err := publicKey(s)
			return err
		},
	}
}

// publicKey returns the peer's public key.
func publicKey(s tls.ConnectionState) (ed25519.PublicKey, error) {
	if len(s.PeerCertificates) == 1 {
		if key, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey); ok {
			return key, nil
		}
	}
	return nil, errors.New("it is not an agent of cprun")
}
