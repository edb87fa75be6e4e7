package wire

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"math/big"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testConfig returns the config of a test's agent.
func testConfig(t testing.TB, change func(*Config)) *Config {
	t.Helper()
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	p := &Config{
		Identity: id, Job: "job", Key: []byte("0123456789abcdef"), Silence: 2 * time.Second,
		Hello: func() []byte { return []byte(`{"i":"am"}`) },
		Check: func(net.Addr, ed25519.PublicKey, []byte) error { return nil },
	}
	if change != nil {
		change(p)
	}
	return p
}

// A meeting is an acceptor with its results.
type meeting struct {
	addr    string
	links   chan *Link
	refused chan error
}

func open(t testing.TB, p *Config) *meeting {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &meeting{ln.Addr().String(), make(chan *Link, 256), make(chan error, 256)}
	d := Open(ln, p, func(l *Link) { m.links <- l }, func(err error) { m.refused <- err })
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		close(m.links)
		for l := range m.links {
			l.Close()
			<-l.Closed()
		}
	})
	return m
}

func dial(t testing.TB, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// meet connects two agents.
func meet(t *testing.T, a, b *Config) (*Link, *Link) {
	t.Helper()
	m := open(t, b)
	near, err := Dial(t.Context(), dial(t, m.addr), a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); <-near.Closed() })
	far := <-m.links
	m.links <- far // for its end
	return near, far
}

func TestLinkCarriesMessages(t *testing.T) {
	a, b := testConfig(t, nil), testConfig(t, nil)
	near, far := meet(t, a, b)
	if !near.Key.Equal(b.Identity.public) || !far.Key.Equal(a.Identity.public) || string(near.Hello) != `{"i":"am"}` {
		t.Error("the peer is not who it is")
	}
	for _, size := range []int{1, 1000, MaxFrame} {
		want := bytes.Repeat([]byte{'x'}, size)
		f, err := NewFrame(want)
		if err != nil || !near.Send(f) {
			t.Fatal(err)
		}
		if got, err := far.Receive(); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d bytes: %d came, %v", size, len(got), err)
		}
	}
	if _, err := NewFrame(make([]byte, MaxFrame+1)); err == nil {
		t.Error("a frame that is too long was made")
	}
	f, _ := NewFrame([]byte("last"))
	far.Send(f)
	far.Close() // sends the queued frames
	if got, err := near.Receive(); err != nil || string(got) != "last" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := near.Receive(); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("error %v", err)
	}
}

// A frozen is a connection that can stop to transfer, like one to a host without power.
type frozen struct {
	net.Conn
	on chan struct{}
}

func (f *frozen) Write(p []byte) (int, error) {
	select {
	case <-f.on:
		return len(p), nil
	default:
		return f.Conn.Write(p)
	}
}

// TestSilence checks that a silent dead peer is lost after Silence, and an idle live one is not.
func TestSilence(t *testing.T) {
	short := func(p *Config) { p.Silence = 300 * time.Millisecond }
	m := open(t, testConfig(t, short))
	f := &frozen{dial(t, m.addr), make(chan struct{})}
	near, err := Dial(t.Context(), f, testConfig(t, short))
	if err != nil {
		t.Fatal(err)
	}
	far := <-m.links
	m.links <- far // for the cleanup
	ended := make(chan error, 2)
	for _, l := range []*Link{near, far} {
		go func() {
			_, err := l.Receive()
			ended <- err
		}()
	}
	select {
	case err := <-ended:
		t.Fatalf("an idle link has ended: %v", err)
	case <-time.After(3 * 300 * time.Millisecond):
	}
	close(f.on)
	if err := <-ended; !errors.Is(err, errSilent) {
		t.Errorf("error %v", err)
	}
	near.Close()
	<-near.Closed()
	<-ended
}

func TestHandshakeRefuses(t *testing.T) {
	says := func(text string) func(*Config) {
		return func(p *Config) {
			p.Check = func(net.Addr, ed25519.PublicKey, []byte) error { return errors.New(text) }
		}
	}
	for name, c := range map[string]struct {
		dialer, acceptor func(*Config)
		want             string
		proven           bool
	}{
		"another key": {func(p *Config) { p.Key = []byte("another key, as long") }, nil,
			"keys of the two differ", false},
		"another job":         {func(p *Config) { p.Job = "other\x1b[2Jjob" }, nil, "belongs to job", false},
		"the acceptor checks": {nil, says("other config"), "other config", true},
		"the dialer checks":   {says("other version"), nil, "other version", true},
	} {
		t.Run(name, func(t *testing.T) {
			m := open(t, testConfig(t, c.acceptor))
			l, err := Dial(t.Context(), dial(t, m.addr), testConfig(t, c.dialer))
			refusal := (*Refusal)(nil)
			if l != nil || !errors.As(err, &refusal) || !strings.Contains(refusal.Text, c.want) ||
				refusal.Proven != c.proven {
				t.Fatalf("the dialer got %v", err)
			}
			if strings.ContainsAny(refusal.Text, "\x1b\n") || !strings.Contains(err.Error(), m.addr) {
				t.Errorf("text %q", err)
			}
			err = <-m.refused
			other := (*Refusal)(nil)
			if !errors.As(err, &other) || !strings.Contains(other.Text, c.want) || other.Theirs == refusal.Theirs ||
				other.Peer != "127.0.0.1" {
				t.Errorf("the acceptor got %v", err)
			}
		})
	}
}

func TestAgentMeetsItself(t *testing.T) {
	p := testConfig(t, nil)
	m := open(t, p)
	if _, err := Dial(t.Context(), dial(t, m.addr), p); !errors.Is(err, ErrSelf) {
		t.Errorf("error %v", err)
	}
}

// TestRelayIsFoundOut checks that a relay without the key, which speaks TLS with both sides and forwards their messages
// and proofs, is detected.
func TestRelayIsFoundOut(t *testing.T) {
	m := open(t, testConfig(t, nil))
	between, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		one, two := tls.Server(conn, between.tls()), tls.Client(dial(t, m.addr), between.tls())
		both := make(chan struct{}, 2)
		hand := func(to, from *tls.Conn) {
			io.Copy(to, from)
			to.Close()
			both <- struct{}{}
		}
		go hand(one, two)
		hand(two, one)
		<-both
		<-both
	}()
	_, err = Dial(t.Context(), dial(t, ln.Addr().String()), testConfig(t, nil))
	if refusal := (*Refusal)(nil); !errors.As(err, &refusal) || !strings.Contains(refusal.Text, "keys") {
		t.Errorf("error %v", err)
	}
	if err := <-m.refused; !strings.Contains(err.Error(), "keys") {
		t.Errorf("the other side: %v", err)
	}
	<-done
}

// TestProofIsOfARole checks that a proof reflected to its sender proves nothing.
func TestProofIsOfARole(t *testing.T) {
	p := testConfig(t, nil)
	var state tls.ConnectionState
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	other := tls.Server(b, testConfig(t, nil).Identity.tls())
	go other.Handshake()
	c := tls.Client(a, p.Identity.tls())
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	state = c.ConnectionState()
	if bytes.Equal(p.proof(state, dialer, "job"), p.proof(state, acceptor, "job")) {
		t.Error("the proofs of both roles are the same")
	}
	if p.verify(state, acceptor, &greeting{Job: "job", Proof: p.proof(state, dialer, "job")}) == nil {
		t.Error("a proof of another role is taken")
	}
	if p.verify(state, dialer, &greeting{Job: "job"}) == nil {
		t.Error("no proof is taken")
	}
	if bytes.Equal(p.proof(state, dialer, "job"), p.proof(state, dialer, "jo")) {
		t.Error("the proofs of two jobs are the same")
	}
}

// TestStrangersKeepNobodyOut checks that silent or malformed connections block no agent and hold no memory.
func TestStrangersKeepNobodyOut(t *testing.T) {
	m := open(t, testConfig(t, nil))
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range 300 {
		conn := dial(t, m.addr)
		defer conn.Close()
		switch i % 3 {
		case 0: // half open
		case 1:
			conn.Write(bytes.Repeat([]byte{0xff}, 1<<10))
		case 2:
			conn.Write([]byte{22, 3, 1, 0xff}) // the start of a TLS record
		}
	}
	l, err := Dial(t.Context(), dial(t, m.addr), testConfig(t, nil))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	<-l.Closed()
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 16<<20 {
		t.Errorf("%d bytes more are held", grown)
	}
}

// TestForeignCertificates checks that agents with other TLS certificates are refused.
func TestForeignCertificates(t *testing.T) {
	m := open(t, testConfig(t, nil))
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	form := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, form, form, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	for name, conf := range map[string]*tls.Config{
		"RSA": {Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
			InsecureSkipVerify: true},
		"none":    {InsecureSkipVerify: true},
		"TLS 1.2": {MaxVersion: tls.VersionTLS12, InsecureSkipVerify: true},
	} {
		conn := tls.Client(dial(t, m.addr), conf)
		conn.Handshake()
		io.Copy(io.Discard, conn)
		conn.Close()
		select {
		case l := <-m.links:
			t.Errorf("%s: taken as %x", name, l.Key)
		case <-m.refused:
		}
	}
}

func TestHandshakeEndsInTime(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, a, testConfig(t, nil)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// TestReadFrame checks that a frame's length is validated before memory is allocated.
func TestReadFrame(t *testing.T) {
	if _, err := readFrame(bytes.NewReader([]byte{0xff, 0xff, 0xff, 0xff}), MaxFrame); err == nil ||
		errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("4 GiB: %v", err)
	}
	if _, err := readFrame(bytes.NewReader([]byte{0, 0, 0, 9, 1}), MaxFrame); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a frame cut short: %v", err)
	}
}

func FuzzReadGreeting(f *testing.F) {
	for _, s := range []string{`{}`, `{"job":"j","proof":"AAAA"}`, `{"hello":{"a":[1,2]}}`,
		`{"refused":"x","both":true}`, `{"x":1}`} {
		f.Add(append(binary.BigEndian.AppendUint32(nil, uint32(len(s))), s...))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var g greeting
		if readGreeting(bytes.NewReader(raw), &g) != nil {
			return
		}
		if len(g.Job)+len(g.Proof)+len(g.Hello)+len(g.Refused) > 2*maxGreeting {
			t.Errorf("%d bytes of greeting", len(raw))
		}
		if text := clean(g.Refused); strings.ContainsAny(text, "\x1b\n\r") {
			t.Errorf("text %q", text)
		}
	})
}
