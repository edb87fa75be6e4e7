package wire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
)

func testIdentity(rank int) *identity {
	c := Config{
		Rank:   rank,
		Size:   3,
		Secret: []byte("0123456789abcdef"),
		RunID:  "run",
		Name:   fmt.Sprintf("pid %d", rank),
	}
	return c.identity()
}

// shake runs both sides of a handshake on a connection from a to b.
func shake(
	dialer, acceptor *identity,
	a, b net.Conn,
	say [2]Mode,
	want int,
) (dialed, accepted *channel, dialErr, acceptErr error) {
	defer a.Close()
	defer b.Close()
	done := make(chan struct{})
	go func() {
		accepted, acceptErr = acceptor.accept(b, say[1], func() {}, func(int) error { return nil })
		b.Close()
		close(done)
	}()
	dialed, dialErr = dialer.dial(a, say[0], want, func() bool { return true })
	a.Close()
	<-done
	return
}

// both returns one mode for both sides.
func both(mode Mode) [2]Mode { return [2]Mode{mode, mode} }

func TestHandshake(t *testing.T) {
	for _, mode := range []Mode{Plain, Sealed} {
		here, there := net.Pipe()
		d, a, err1, err2 := shake(testIdentity(2), testIdentity(1), here, there, both(mode), 1)
		if err1 != nil || err2 != nil {
			t.Fatalf("%v: %v, %v", mode, err1, err2)
		}
		if d.rank != 1 || d.name != "pid 1" || a.rank != 2 || a.name != "pid 2" {
			t.Errorf("the dialer met rank %d (%s), the acceptor rank %d (%s)", d.rank, d.name, a.rank, a.name)
		}
		if mode == Sealed && reflect.DeepEqual(a.out.(*sealedWriter).aead, d.out.(*sealedWriter).aead) {
			t.Error("both directions have one key")
		}
	}
}

func TestHandshakeRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(dialer, acceptor *identity)
		want     int
		dialer   string // in the dialer's error
		acceptor string // in the acceptor's
	}{
		"secret":       {func(d, _ *identity) { d.secret = []byte("another secret!!") }, 1, "hung up", "secret"},
		"run":          {func(d, _ *identity) { d.run[0]++ }, 1, "", "another run"},
		"size":         {func(d, _ *identity) { d.size = 4 }, 1, "", "world of 4 ranks, this is one of 3"},
		"lower rank":   {func(d, _ *identity) { d.rank = 0 }, 1, "", "rank 0"},
		"own rank":     {func(d, _ *identity) { d.rank = 1 }, 1, "", "rank 1"},
		"other server": {func(_, a *identity) { a.rank = 0 }, 1, "rank 0", ""},
		"beyond":       {func(d, _ *identity) { d.rank = 9 }, 1, "", "rank 9 of 3"},
		"name":         {func(d, _ *identity) { d.name = "a\x1b[2Jb" }, 1, "", "cannot be printed"},
	} {
		d, a := testIdentity(2), testIdentity(1)
		c.change(d, a)
		here, there := net.Pipe()
		_, _, err1, err2 := shake(d, a, here, there, both(Plain), c.want)
		if err1 == nil || err2 == nil || !strings.Contains(err1.Error(), c.dialer) ||
			!strings.Contains(err2.Error(), c.acceptor) {
			t.Errorf("%s: dialer %v, want %q; acceptor %v, want %q", name, err1, c.dialer, err2, c.acceptor)
		}
	}
}

// TestModesMustAgree makes one side seal and the other not: they refuse each other. A relay that shows each side its
// own mode breaks the proofs.
func TestModesMustAgree(t *testing.T) {
	for _, modes := range [][2]Mode{{Sealed, Plain}, {Plain, Sealed}} {
		here, there := net.Pipe()
		_, _, _, err := shake(testIdentity(2), testIdentity(1), here, there, modes, 1)
		if want := fmt.Sprintf("its frames are %v, on this connection they are %v", modes[0], modes[1]); err == nil ||
			err.Error() != want {
			t.Errorf("%v: %v, want %q", modes, err, want)
		}
		here, near := net.Pipe()
		far, there := net.Pipe()
		go relay(near, far, modes[1])
		go relay(far, near, modes[0])
		_, _, err1, err2 := shake(testIdentity(2), testIdentity(1), here, there, modes, 1)
		near.Close()
		far.Close()
		if err1 == nil || err2 != errProof {
			t.Errorf("%v through a relay: dialer %v; acceptor %v, want %v", modes, err1, err2, errProof)
		}
	}
}

// Frames that are not sealed go over Unix sockets alone, whatever the config says.
func TestPlainOverTCP(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	said := make(chan string, 100)
	secret := []byte("0123456789abcdef")
	log := func(format string, args ...any) {
		select {
		case said <- fmt.Sprintf(format, args...):
		default:
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		c := Config{
			Rank:      0,
			Size:      2,
			Secret:    secret,
			Timeout:   200 * time.Millisecond,
			Log:       log,
			Listeners: []Listener{{ln, Plain}},
		}
		if _, err := Connect(t.Context(), c); !errors.Is(err, blame.ErrDeadline) {
			t.Errorf("the listener: %v", err)
		}
	})
	c := Config{
		Rank:    1,
		Size:    2,
		Secret:  secret,
		Timeout: 200 * time.Millisecond,
		Log:     log,
		Dial: func(ctx context.Context, _ int) (net.Conn, Mode, error) {
			conn, err := DialTCP(ctx, ln.Addr().String())
			return conn, Plain, err
		},
	}
	if _, err := Connect(t.Context(), c); !errors.Is(err, blame.ErrDeadline) ||
		!strings.Contains(err.Error(), "plain frames over tcp") {
		t.Errorf("the dialer: %v", err)
	}
	wg.Wait()
	if text := <-said; !strings.Contains(text, "plain frames over tcp") {
		t.Errorf("the listener said %q", text)
	}
}

// relay copies bytes, with another mode in the first hello.
func relay(from, to net.Conn, mode Mode) {
	defer to.Close()
	raw := make([]byte, helloFixed)
	if _, err := io.ReadFull(from, raw); err != nil {
		return
	}
	raw[helloMode] = byte(mode)
	if _, err := to.Write(raw); err != nil {
		return
	}
	io.Copy(to, from)
}

// FuzzHandshake plays a dialer without the secret, and an acceptor, to each side.
func FuzzHandshake(f *testing.F) {
	good, err1 := testIdentity(2).hello(Sealed)
	server, err2 := testIdentity(1).hello(Sealed)
	if err := errors.Join(err1, err2); err != nil {
		f.Fatal(err)
	}
	f.Add(good.raw)
	f.Add(append(bytes.Clone(good.raw), make([]byte, 32)...))
	f.Add(good.raw[:20])
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add(append(bytes.Clone(server.raw), make([]byte, 32)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := testIdentity(0).readHello(bytes.NewReader(b)); err == nil {
			again := h.encode()
			if again = append(again, testIdentity(0).code("hello", again)...); !bytes.Equal(again, h.raw) ||
				!bytes.HasPrefix(b, again) {
				t.Fatalf("%x is read as %+v", b, h)
			}
		}
		if p, err := testIdentity(1).accept(&script{in: bytes.NewReader(b)}, Sealed, func() {}, func(int) error { return nil }); err == nil {
			t.Fatalf("accepted %+v without a proof", p)
		}
		if p, err := testIdentity(2).dial(&script{in: bytes.NewReader(b)}, Sealed, 1, func() bool { return true }); err == nil {
			t.Fatalf("dialed %+v without a proof", p)
		}
	})
}

// A script is a connection with given input.
type script struct {
	net.Conn
	in *bytes.Reader
}

func (s *script) Read(b []byte) (int, error)  { return s.in.Read(b) }
func (s *script) Write(b []byte) (int, error) { return len(b), nil }
