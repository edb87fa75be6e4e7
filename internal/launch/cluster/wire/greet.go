// Package wire has the authenticated connections between the agents of a job: TLS 1.3 between keys that
// the agents have made for themselves, proof on both sides of the job's key, frames of a bounded length,
// and a word now and then by which each knows that the other is there.
//
// Goroutines, and who ends them:
//
//	accept   one a Door, takes connections; ends with the listener
//	greet    one a connection that has not proven the key; ends with its handshake, after Patience at most
//	send     one a Link, writes its frames; ends with the link
package wire

import (
	"bytes"
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

// Party describes an agent to the handshake.
type Config struct {
	Identity *Identity
	Job      string
	Key      []byte
	// Hello describes this agent to peers that have proven the key: at most 12 KiB.
	Hello func() []byte
	// Check looks at a peer's hello. Its error refuses the peer, which is told the text.
	Check func(from net.Addr, key ed25519.PublicKey, hello []byte) error
	// Silence bounds the silence of a peer. After it, the peer counts as lost.
	Silence time.Duration
}

// Patience bounds a handshake.
const HandshakeTimeout = 5 * time.Second

// Refusal is the error of a handshake in which one side refuses the other.
type Refusal struct {
	Peer   string // its address
	Text   string
	Theirs bool // the peer has refused this agent
	Proven bool // after it had proven the key
	Both   bool // two agents dial each other, and the other connection is the one that stays
}

func (r *Refusal) Error() string {
	if r.Theirs {
		return fmt.Sprintf("the agent at %s refuses this one: %s", r.Peer, r.Text)
	}
	return fmt.Sprintf("the agent at %s is refused: %s", r.Peer, r.Text)
}

// ErrSelf is the error of a handshake of an agent with itself.
var ErrSelf = errors.New("it is this agent")

// ErrBoth is the error of Check if two agents dial each other at the same time. It ends one of the two connections.
var ErrBoth = errors.New("the two agents dial each other")

// A greeting is a frame of the handshake. After TLS the dialer sends its proof, then the other; then each
// its hello; at last the dialer's yes. One that refuses sends the reason instead, and ends.
type greeting struct {
	Job     string          `json:"job,omitempty"`
	Proof   []byte          `json:"proof,omitempty"`
	Hello   json.RawMessage `json:"hello,omitempty"`
	Refused string          `json:"refused,omitempty"`
	Both    bool            `json:"both,omitempty"`
}

// A proof contains the role of its maker, so that it cannot be sent back to its maker.
const (
	dialer   = "dials"
	acceptor = "accepts"
)

// Dial does the dialer's side of the handshake. It closes conn if that fails.
func Dial(ctx context.Context, conn net.Conn, p *Config) (*Link, error) {
	return p.handshake(ctx, tls.Client(conn, p.Identity.tls()), dialer, acceptor)
}

// Accept does the other side. It closes conn if that fails.
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
			err = fmt.Errorf("agent at %s: handshake: %w", conn.RemoteAddr(), cmpErr(context.Cause(ctx), err))
		}
		return nil, err
	}
	return newLink(conn, l, p.Silence), nil
}

// cmpErr returns the first error that is one.
func cmpErr(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// A peer has proven its key and described itself.
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
	if mine == acceptor { // the dialer's port differs each time, so that repetitions would look like news
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
	// The dialer speaks first, and last.
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

// proof shows that its maker has the job's key, on this connection and in this role alone.
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

// verify checks the proof of a peer.
func (p *Config) verify(state tls.ConnectionState, role string, g *greeting) error {
	want := p.proof(state, role, g.Job)
	switch {
	case len(want) == 0 || !hmac.Equal(want, g.Proof):
		return errors.New("the keys of the two differ: all agents of a job need the same key file, CPRUN_KEY_FILE or " +
			".key in a --run-dir that their nodes share")
	case g.Job != p.Job:
		return fmt.Errorf("it belongs to job %q, and the other to job %q", g.Job, p.Job)
	}
	return nil
}

// A shake is one handshake.
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

// receive reads a greeting and looks at it. A fault that check finds goes to the peer as well.
func (s *handshake) receive(g *greeting, proven bool, check func() error) error {
	if err := readGreeting(s.conn, g); err != nil {
		return err
	}
	if g.Refused != "" {
		return &Refusal{Peer: s.from, Text: clean(g.Refused), Theirs: true, Proven: proven, Both: g.Both}
	}
	if fault := check(); fault != nil {
		both := errors.Is(fault, ErrBoth)
		s.send(greeting{Refused: fault.Error(), Both: both}) // it hears of it, or is gone
		return &Refusal{Peer: s.from, Text: clean(fault.Error()), Proven: proven, Both: both}
	}
	return nil
}

// readGreeting reads a frame of the handshake.
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

// clean makes a peer's text fit for one line of a message.
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
	// No one looks at the times: the key is what counts, and it is proven by the handshake.
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
var errForeign = errors.New("it is no agent of cprun")

// tls returns how this agent speaks TLS, in both roles.
func (id *Identity) tls() *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{id.cert}, MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
		// There is no authority that signs. What follows the handshake proves that the owner of the
		// key has the job's as well.
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
		return nil, errForeign
	}
	key, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	if !ok {
		return nil, errForeign
	}
	return key, nil
}
