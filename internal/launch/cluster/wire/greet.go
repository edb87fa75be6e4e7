// Package wire connects the agents of a job with authenticated connections: TLS 1.3 with a key pair that all agents
// derive from the job's key. Whoever completes the handshake has the key. A connection is a Link, with greetings,
// bounded frames and keepalives, or a plain stream for gossip.
//
//	config := &wire.Config{Identity: id, Job: "7", Hello: hello, Check: check, Silence: 5 * time.Second}
//	acceptor := wire.Open(listener, config, func(l *wire.Link) { … }, gossip.Accept, func(err error) { … })
//	link, err := wire.Dial(ctx, conn, config)
package wire

import (
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/terminal"
)

// Config describes an agent for the handshake.
type Config struct {
	Identity *Identity
	Job      string
	// Hello returns this agent's description for peers with the key: at most 12 KiB.
	Hello func() []byte
	// Check validates a peer's hello; dialed: this agent dialed. An error refuses the peer and is sent to it.
	Check func(hello []byte, dialed bool) error
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
	Proven bool // the peer has the key and belongs to the job
}

func (r *Refusal) Error() string {
	if r.Theirs {
		return fmt.Sprintf("the agent at %s refuses this node: %s", r.Peer, r.Text)
	}
	return fmt.Sprintf("refused the agent at %s: %s", r.Peer, r.Text)
}

// Is reports whether the refusing side's Check returned the error target.
func (r *Refusal) Is(target error) bool { return r.Proven && r.Text == target.Error() }

// Errors of Check.
var (
	ErrSelf = errors.New("this agent dialed itself")
	// ErrBoth ends one of two connections if two agents dial each other at the same time.
	ErrBoth = errors.New("both agents dialed each other")
)

// ErrForeign ends a handshake with a program that does not speak TLS, which no agent of any job is.
var ErrForeign = errors.New("another program answers there, not cprun: stop it, or name a free port with --rendezvous")

// errKeys refuses a peer without the key.
var errKeys = errors.New("its certificate is not of this job, or the keys of the two differ: give all nodes the same " +
	"key file, by CPRUN_KEY_FILE or by a shared --run-dir")

// A greeting is a frame of the handshake of a link. After TLS, the dialer sends its hello, then the acceptor; then the
// dialer confirms. A side that refuses sends the reason instead and closes the connection.
type greeting struct {
	Job     string          `json:"job"`
	Hello   json.RawMessage `json:"hello,omitempty"`
	Refused string          `json:"refused,omitempty"`
}

// The protocols that TLS negotiates on the port of an agent.
const (
	links   = "cprun-agent"
	streams = "cprun-gossip"
)

// Dial performs the dialer's side of the handshake of a link. It closes conn on failure.
func Dial(ctx context.Context, conn net.Conn, p *Config) (*Link, error) {
	secured := tls.Client(conn, p.Identity.tls(links))
	hello, err := p.handshake(ctx, secured, true)
	if err != nil {
		return nil, err
	}
	return newLink(secured, hello, p.Silence), nil
}

// DialStream returns a stream for gossip over conn. It closes conn on failure.
func DialStream(ctx context.Context, conn net.Conn, p *Config) (net.Conn, error) {
	secured := tls.Client(conn, p.Identity.tls(streams))
	_, err := p.handshake(ctx, secured, true)
	return secured, err
}

// handshake returns the peer's hello, or nil for a stream.
func (p *Config) handshake(ctx context.Context, conn *tls.Conn, dialer bool) (hello []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, HandshakeTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.NetConn().Close() })
	s := handshake{p, conn, conn.RemoteAddr().String()}
	if !dialer { // without the dialer's random port, so that repeated log lines are equal
		s.from, _, _ = net.SplitHostPort(s.from)
	}
	if err = conn.HandshakeContext(ctx); err != nil {
		err = s.explain(err)
	} else if conn.ConnectionState().NegotiatedProtocol != streams {
		hello, err = s.greet(dialer)
	}
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.NetConn().Close()
		if refusal := (*Refusal)(nil); !errors.As(err, &refusal) {
			err = fmt.Errorf("handshake with %s: %w", s.from, err)
		}
	}
	return hello, err
}

type handshake struct {
	*Config
	conn *tls.Conn
	from string // the peer's address
}

// explain returns a Refusal if a side lacks the job's key, and ErrForeign if the peer is no agent.
func (s *handshake) explain(err error) error {
	if errors.As(err, new(tls.RecordHeaderError)) {
		return ErrForeign
	}
	if text := err.Error(); strings.Contains(text, "certificate") {
		return &Refusal{Peer: s.from, Text: errKeys.Error(), Theirs: strings.HasPrefix(text, "remote error")}
	}
	return err
}

// greet exchanges the hellos and returns the peer's.
func (s *handshake) greet(dialer bool) (hello []byte, err error) {
	mine := greeting{Job: s.Job, Hello: s.Hello()}
	if !dialer {
		if hello, err = s.receiveHello(dialer); err == nil {
			err = s.send(mine)
		}
		if err == nil {
			_, err = s.receive()
		}
		return hello, err
	}
	if err = s.send(mine); err == nil {
		hello, err = s.receiveHello(dialer)
	}
	if err == nil {
		err = s.send(greeting{Job: s.Job})
	}
	return hello, err
}

func (s *handshake) send(g greeting) error {
	f, err := NewFrame(g)
	if err == nil {
		_, err = s.conn.Write(f)
	}
	return err
}

// receiveHello reads the peer's hello and checks it. The peer also gets the error.
func (s *handshake) receiveHello(dialer bool) ([]byte, error) {
	g, err := s.receive()
	if err != nil {
		return nil, err
	}
	var fault error
	if g.Job != s.Job {
		fault = fmt.Errorf("it belongs to job %q, this agent to job %q", g.Job, s.Job)
	} else {
		fault = s.Check(g.Hello, dialer)
	}
	if fault != nil {
		s.send(greeting{Job: s.Job, Refused: fault.Error()}) // best effort
		return nil, s.refusal(g, fault.Error())
	}
	return g.Hello, nil
}

// receive reads a greeting. It returns an error if the peer refuses.
func (s *handshake) receive() (*greeting, error) {
	g, err := readGreeting(s.conn)
	if err == nil && g.Refused != "" {
		refusal := s.refusal(g, g.Refused)
		refusal.Theirs = true
		err = refusal
	}
	return g, err
}

func (s *handshake) refusal(g *greeting, text string) *Refusal {
	return &Refusal{Peer: s.from, Text: clean(text), Proven: g.Job == s.Job}
}

func readGreeting(r io.Reader) (*greeting, error) {
	message, err := readFrame(r, maxGreeting)
	if err != nil {
		return nil, err
	}
	g := new(greeting)
	if err := json.Unmarshal(message, g); err != nil {
		return nil, fmt.Errorf("greeting: %w", err)
	}
	return g, nil
}

// clean fits a peer's text into one line of a message.
func clean(text string) string {
	const most = 512
	return terminal.Clip(terminal.Line(text), most)
}

// Identity is the key pair of all agents of a job.
type Identity struct {
	cert   tls.Certificate
	public ed25519.PublicKey
}

// NewIdentity derives the key pair from the job's key.
func NewIdentity(key []byte) (*Identity, error) {
	seed, err := hkdf.Key(sha256.New, key, nil, "cprun agents: identity", ed25519.SeedSize)
	if err != nil {
		return nil, fmt.Errorf("key of the job: %w", err)
	}
	private := ed25519.NewKeyFromSeed(seed)
	public := private.Public().(ed25519.PublicKey)
	// Peers compare the public key alone, not the times.
	form := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0),
		NotAfter: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, form, form, public, private)
	if err != nil {
		return nil, fmt.Errorf("certificate of this agent: %w", err)
	}
	return &Identity{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}, public}, nil
}

// tls returns a TLS configuration for both roles. TLS 1.3 signs the whole handshake under the name of the role, so a
// relayed, reflected or replayed handshake fails.
func (id *Identity) tls(protocols ...string) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{id.cert}, MinVersion: tls.VersionTLS13, NextProtos: protocols,
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
		// VerifyConnection replaces the check of a certificate authority.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if !id.public.Equal(s.PeerCertificates[0].PublicKey) {
				return errKeys
			}
			return nil
		},
	}
}
