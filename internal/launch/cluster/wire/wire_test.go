package wire

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
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

// testConfig returns the config of a test's agent, with the job's key.
func testConfig(t testing.TB, change func(*Config)) *Config {
	t.Helper()
	p := &Config{
		Identity: identity(t, "0123456789abcdef"), Job: "job", Silence: 2 * time.Second,
		Hello: func() []byte { return []byte(`{"i":"am"}`) },
		Check: func([]byte, bool) error { return nil },
	}
	if change != nil {
		change(p)
	}
	return p
}

func identity(t testing.TB, key string) *Identity {
	t.Helper()
	id, err := NewIdentity([]byte(key))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// A meeting is an acceptor with its results.
type meeting struct {
	addr    string
	links   chan *Link
	streams chan net.Conn
	refused chan error
}

func open(t testing.TB, p *Config) *meeting {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &meeting{ln.Addr().String(), make(chan *Link, 256), make(chan net.Conn, 256), make(chan error, 256)}
	d := Open(ln, p, func(l *Link) { m.links <- l }, func(c net.Conn) { m.streams <- c },
		func(err error) { m.refused <- err })
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
	near, far := meet(t, testConfig(t, func(p *Config) { p.Hello = func() []byte { return []byte(`{"i":"a"}`) } }),
		testConfig(t, func(p *Config) { p.Hello = func() []byte { return []byte(`{"i":"b"}`) } }))
	if string(near.Hello) != `{"i":"b"}` || string(far.Hello) != `{"i":"a"}` {
		t.Errorf("the hellos are %s and %s", near.Hello, far.Hello)
	}
	for _, size := range []int{2, 1000, MaxFrame} {
		want := strings.Repeat("x", size-2)
		f, err := NewFrame(want)
		if err != nil || !near.Send(f) {
			t.Fatal(err)
		}
		if got, err := far.Receive(); err != nil || string(got) != `"`+want+`"` {
			t.Fatalf("%d bytes: %d came, %v", size, len(got), err)
		}
	}
	if _, err := NewFrame(strings.Repeat("x", MaxFrame-1)); err == nil {
		t.Error("a frame that is too long was made")
	}
}

// TestCloseSendsTheQueue checks that a closed link still sends its frames, and then ends.
func TestCloseSendsTheQueue(t *testing.T) {
	slow := func(p *Config) { p.Silence = time.Minute }
	near, far := meet(t, testConfig(t, slow), testConfig(t, slow))
	const n = 128
	f, err := NewFrame(strings.Repeat("x", 64<<10)) // more in all than the system's buffers
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		if !far.Send(f) {
			t.Fatal("the queue is full")
		}
	}
	far.Close()
	for i := range n {
		if _, err := near.Receive(); err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
	}
	for _, l := range []*Link{near, far} {
		if _, err := l.Receive(); err == nil || !strings.Contains(err.Error(), "has ended") {
			t.Errorf("error %v", err)
		}
		near.Close()
	}
}

// TestLinkToOneThatReadsNothing checks that a link ends if its peer takes no frame.
func TestLinkToOneThatReadsNothing(t *testing.T) {
	near, _ := meet(t, testConfig(t, func(p *Config) { p.Silence = 100 * time.Millisecond }), testConfig(t, nil))
	f, err := NewFrame(strings.Repeat("x", MaxFrame-2))
	if err != nil {
		t.Fatal(err)
	}
	for near.Send(f) { // until the queue is full
	}
	<-near.Closed()
}

// TestLinkEndsWithBrokenFrames checks the errors of a link whose peer ends within a frame, or sends another protocol.
func TestLinkEndsWithBrokenFrames(t *testing.T) {
	for want, raw := range map[string][]byte{"has ended": {0, 0, 0, 9, 1}, "lost the connection": {0xff, 0xff, 0xff, 0xff}} {
		near, far := meet(t, testConfig(t, nil), testConfig(t, nil))
		far.conn.Write(raw)
		far.conn.NetConn().Close()
		if _, err := near.Receive(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
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

// TestStreams checks that a port also carries streams, without hellos.
func TestStreams(t *testing.T) {
	m := open(t, testConfig(t, func(p *Config) { p.Check = func([]byte, bool) error { return errors.New("a hello") } }))
	near, err := DialStream(t.Context(), dial(t, m.addr), testConfig(t, nil))
	if err != nil {
		t.Fatal(err)
	}
	far := <-m.streams
	defer far.Close()
	go func() {
		near.Write([]byte("hello"))
		near.Close()
	}()
	if got, err := io.ReadAll(far); string(got) != "hello" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	other := testConfig(t, func(p *Config) { p.Identity = identity(t, "another key, as long") })
	if _, err := DialStream(t.Context(), dial(t, m.addr), other); !refusedFor(err, "keys of the two differ") {
		t.Errorf("with another key: %v", err)
	}
	if err := <-m.refused; !refusedFor(err, "keys of the two differ") {
		t.Errorf("the acceptor got %v", err)
	}
}

// refusedFor reports whether an agent was refused for a reason.
func refusedFor(err error, reason string) bool {
	refusal := (*Refusal)(nil)
	return errors.As(err, &refusal) && strings.Contains(refusal.Text, reason)
}

func TestHandshakeRefuses(t *testing.T) {
	says := func(text string) func(*Config) {
		return func(p *Config) { p.Check = func([]byte, bool) error { return errors.New(text) } }
	}
	for name, c := range map[string]struct {
		dialer, acceptor func(*Config)
		want             string
		proven           bool
	}{
		"another key": {func(p *Config) { p.Identity = identity(t, "another key, as long") }, nil,
			"keys of the two differ", false},
		"another job":         {func(p *Config) { p.Job = "other\x1b[2Jjob" }, nil, `"job"`, false},
		"the acceptor checks": {nil, says("other config"), "other config", true},
		"the dialer checks":   {says("other\x1b[2J\nversion"), nil, "otherversion", true},
		"the acceptor checks as such": {nil, func(p *Config) {
			p.Check = func(_ []byte, dialed bool) error { return fmt.Errorf("dialed: %v", dialed) }
		}, "dialed: false", true},
		"the dialer checks as such": {func(p *Config) {
			p.Check = func(_ []byte, dialed bool) error { return fmt.Errorf("dialed: %v", dialed) }
		}, nil, "dialed: true", true},
		"itself": {nil, func(p *Config) { p.Check = func([]byte, bool) error { return ErrSelf } }, ErrSelf.Error(), true},
	} {
		t.Run(name, func(t *testing.T) {
			m := open(t, testConfig(t, c.acceptor))
			l, err := Dial(t.Context(), dial(t, m.addr), testConfig(t, c.dialer))
			refusal := (*Refusal)(nil)
			if l != nil || !errors.As(err, &refusal) || !strings.Contains(refusal.Text, c.want) ||
				refusal.Proven != c.proven {
				t.Fatalf("the dialer got %v", err)
			}
			text := map[bool]string{false: "refused the agent at " + m.addr, true: "the agent at " + m.addr + " refuses"}
			if strings.ContainsAny(refusal.Text, "\x1b\n") || !strings.HasPrefix(err.Error(), text[refusal.Theirs]) {
				t.Errorf("text %q", err)
			}
			got := <-m.refused
			other := (*Refusal)(nil)
			if !errors.As(got, &other) || !strings.Contains(other.Text, c.want) || other.Theirs == refusal.Theirs ||
				other.Peer != "127.0.0.1" || other.Proven != c.proven {
				t.Errorf("the acceptor got %v", got)
			}
			if is := name == "itself"; errors.Is(err, ErrSelf) != is || errors.Is(got, ErrSelf) != is {
				t.Errorf("%v or %v is %v, or is not", err, got, ErrSelf)
			}
		})
	}
}

// TestForeignTextIsNoErrorOfCheck checks that an agent of another job cannot end a dial as ErrSelf.
func TestForeignTextIsNoErrorOfCheck(t *testing.T) {
	if errors.Is(&Refusal{Text: ErrSelf.Error(), Theirs: true}, ErrSelf) {
		t.Error("an agent of another job is this agent")
	}
}

// TestRelayIsFoundOut checks that a relay without the key, which presents each side the certificate of the other, gets
// no connection.
func TestRelayIsFoundOut(t *testing.T) {
	m := open(t, testConfig(t, nil))
	stolen := stolenIdentity(t)
	a, b := net.Pipe()
	done := make(chan error, 1)
	go func() {
		server := tls.Server(b, stolen.tls(links))
		err := server.Handshake()
		b.Close()
		done <- err
	}()
	if l, err := Dial(t.Context(), a, testConfig(t, nil)); l != nil || !refusedFor(err, "keys of the two differ") {
		t.Errorf("the dialer got %v", err)
	}
	if err := <-done; err == nil {
		t.Error("the relay's handshake with the dialer has succeeded")
	}
	client := tls.Client(dial(t, m.addr), stolen.tls(links))
	defer client.Close()
	client.Handshake() // ends before the acceptor has checked it
	if n, err := client.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the relay read %d bytes from the acceptor, %v", n, err)
	}
	if err := <-m.refused; !refusedFor(err, "keys of the two differ") {
		t.Errorf("the acceptor got %v", err)
	}
}

// stolenIdentity returns the certificate of the job, which anyone who connects can see, with another private key.
func stolenIdentity(t *testing.T) *Identity {
	id := *identity(t, "0123456789abcdef")
	id.cert.PrivateKey = stolenKey{identity(t, "another key, as long").cert.PrivateKey.(ed25519.PrivateKey), id.public}
	return &id
}

// A stolenKey signs with another key than it claims.
type stolenKey struct {
	ed25519.PrivateKey
	public ed25519.PublicKey
}

func (k stolenKey) Public() crypto.PublicKey { return k.public }

// TestReflectionIsFoundOut checks that an agent's own messages, sent back to it, prove nothing.
func TestReflectionIsFoundOut(t *testing.T) {
	a, b := net.Pipe()
	go io.Copy(b, b)
	defer b.Close()
	if l, err := Dial(t.Context(), a, testConfig(t, nil)); l != nil || err == nil {
		t.Errorf("a mirror is an agent: %v", err)
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
		"none": {InsecureSkipVerify: true},
		"TLS 1.2": {Certificates: []tls.Certificate{identity(t, "0123456789abcdef").cert},
			MaxVersion: tls.VersionTLS12, InsecureSkipVerify: true},
	} {
		conf.NextProtos = []string{links, streams}
		conn := tls.Client(dial(t, m.addr), conf)
		conn.Handshake()
		f, _ := NewFrame(greeting{Job: "job", Hello: []byte("{}")})
		conn.Write(append(f, f...))
		io.Copy(io.Discard, conn)
		conn.Close()
		select {
		case l := <-m.links:
			t.Errorf("%s: taken as %s", name, l.Hello)
		case <-m.refused:
		}
	}
}

// TestHandshakeEnds checks a dial to peers that do not complete the handshake. It names the peer, and closes the
// connection.
func TestHandshakeEnds(t *testing.T) {
	for name, c := range map[string]struct {
		answer string // after TLS; with "-": in place of TLS, "": an end
		is     error
		says   string
	}{
		"no answer":   {answer: "-", is: context.DeadlineExceeded},
		"no TLS":      {answer: "-HTTP/1.1 400 Bad Request", is: ErrForeign, says: "another program"},
		"silence":     {answer: "\x00", is: context.DeadlineExceeded},
		"an end":      {is: io.EOF},
		"no JSON":     {answer: "\x00\x00\x00\x01{", says: "greeting: "},
		"too long":    {answer: "\x00\x01\x00\x00", says: "65536 bytes"},
		"another job": {answer: "\x00\x00\x00\x02{}", says: `job ""`},
	} {
		a, b := net.Pipe()
		limit := time.Minute
		if c.is == context.DeadlineExceeded {
			limit = 50 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		go func() {
			defer b.Close()
			server := tls.Server(b, testConfig(t, nil).Identity.tls(links))
			if text, ok := strings.CutPrefix(c.answer, "-"); ok {
				go b.Write([]byte(text)) // ends with b
				io.Copy(io.Discard, b)
				return
			}
			if server.Handshake() != nil {
				return
			}
			readGreeting(server)
			if c.answer != "" {
				server.Write([]byte(c.answer))
				io.Copy(io.Discard, b)
			}
		}()
		_, err := Dial(ctx, a, testConfig(t, nil))
		if err == nil || !strings.Contains(err.Error(), "pipe: ") || !strings.Contains(err.Error(), c.says) ||
			c.is != nil && !errors.Is(err, c.is) || errors.As(err, new(*Refusal)) != (name == "another job") {
			t.Errorf("%s: error %v", name, err)
		}
		if _, err := a.Read(make([]byte, 1)); err != io.ErrClosedPipe {
			t.Errorf("%s: the connection is open: %v", name, err)
		}
	}
}

// TestCloseEndsHandshakes checks that an acceptor closes unfinished handshakes, without a report, and waits for its
// callbacks.
func TestCloseEndsHandshakes(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	upped, release, closed := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	p := testConfig(t, nil)
	a := Open(ln, p, nil, func(c net.Conn) {
		close(upped)
		<-release
		c.Close()
	}, func(err error) { t.Errorf("refused: %v", err) })
	stream, err := DialStream(t.Context(), dial(t, ln.Addr().String()), p)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	silent := tls.Client(dial(t, ln.Addr().String()), p.Identity.tls(links))
	defer silent.Close()
	if err := silent.Handshake(); err != nil {
		t.Fatal(err)
	}
	<-upped
	go func() { closed <- a.Close() }()
	silent.Read(make([]byte, 1)) // it is closed
	select {
	case <-closed:
		t.Error("closed while a callback runs")
	case <-time.After(10 * time.Millisecond):
	}
	close(release)
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestHelloThatCannotBeSent checks that a dial fails if this agent's own hello is invalid.
func TestHelloThatCannotBeSent(t *testing.T) {
	m := open(t, testConfig(t, nil))
	for hello, want := range map[string]string{"{": "JSON", `"` + strings.Repeat("x", MaxFrame) + `"`: "bytes: at most"} {
		bad := testConfig(t, func(p *Config) { p.Hello = func() []byte { return []byte(hello) } })
		if _, err := Dial(t.Context(), dial(t, m.addr), bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.9s: error %v, want %q", hello, err, want)
		}
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
	for _, s := range []string{`{}`, `{"job":"j"}`, `{"job":"j","hello":{"a":[1,2]}}`, `{"refused":"x\n\u001b\u007f"}`, `{"x":1}`,
		`{"refused":"` + strings.Repeat("x", 1000) + `"}`} {
		f.Add(append(binary.BigEndian.AppendUint32(nil, uint32(len(s))), s...))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		g, err := readGreeting(bytes.NewReader(raw))
		if err != nil {
			return
		}
		if len(g.Job)+len(g.Hello)+len(g.Refused) > 2*maxGreeting {
			t.Errorf("%d bytes of greeting", len(raw))
		}
		if text := clean(g.Refused); strings.ContainsAny(text, "\x1b\n\r\x7f") || len(text) > 600 {
			t.Errorf("text %q", text)
		}
	})
}
